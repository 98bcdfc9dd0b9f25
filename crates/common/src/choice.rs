//! Choices of the command line.

/// Implements `Display` for a choice (`clap::ValueEnum`), which prints it as it is given on the
/// command line.
#[macro_export]
macro_rules! display_choice {
    ($choice:ty) => {
        impl std::fmt::Display for $choice {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let value = clap::ValueEnum::to_possible_value(self);
                f.write_str(value.as_ref().map_or("", |value| value.get_name()))
            }
        }
    };
}
