//! The attacks, by the resource that they use up.

mod connections;
mod encodings;
mod http2;
mod logs;
mod reads;
mod selections;
mod starts;
mod unread;

use super::attack::Attack;

const TABLES: [&[Attack]; 8] = [
    selections::ATTACKS,
    reads::ATTACKS,
    starts::ATTACKS,
    unread::ATTACKS,
    encodings::ATTACKS,
    connections::ATTACKS,
    http2::ATTACKS,
    logs::ATTACKS,
];

/// All attacks, in the order in which they run.
pub fn all() -> impl Iterator<Item = &'static Attack> {
    TABLES.into_iter().flatten()
}

/// The attack of this name.
pub fn find(name: &str) -> Option<&'static Attack> {
    all().find(|attack| attack.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_at_least_thirty_attacks_with_names_of_their_own() {
        let names: std::collections::HashSet<_> = all().map(|attack| attack.name).collect();
        assert_eq!(names.len(), all().count());
        assert!(names.len() >= 30, "{}", names.len());
        assert!(names.iter().all(|name| find(name).is_some()));
    }
}
