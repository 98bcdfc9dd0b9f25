//! The reasons in Rust: enums, so that the server cannot send another text.

use std::fmt::Write as _;

use crate::table::{self, Constant, Table, camel_case, comment};

pub(crate) const PATH: &str = "crates/common/src/generated/reasons.rs";

pub(crate) fn render(table: &Table) -> String {
    let mut out = format!(
        "//! The texts of the contract that are closed sets. Generated from\n//! `{}`.\n\n\
         use std::time::Duration;\n\nuse tonic::Code;\n\n\
         /// The domain of the reasons: `google.rpc.ErrorInfo.domain`.\n\
         pub const ERROR_DOMAIN: &str = \"{}\";\n",
        table::PATH,
        table.domain
    );
    let errors = table.error_constants();
    out += &an_enum("ErrorReason", "A reason of an error: `google.rpc.ErrorInfo.reason`.", &errors);
    out += "\nimpl ErrorReason {\n    /// The status code that comes with the reason.\n    \
            pub const fn code(self) -> Code {\n        match self {\n";
    for (constant, row) in errors.iter().zip(&table.errors) {
        arm(&mut out, constant, &format!("Code::{}", camel_case(&row.code)));
    }
    out += "        }\n    }\n\n    \
            /// The delay before a retry: `google.rpc.RetryInfo.retry_delay`.\n    \
            /// `None` if a retry cannot succeed by itself.\n    \
            pub const fn retry_delay(self) -> Option<Duration> {\n        match self {\n";
    for (constant, row) in errors.iter().zip(&table.errors) {
        let delay = row.delay.map(|seconds| format!("Some(Duration::from_secs({seconds}))"));
        arm(&mut out, constant, delay.as_deref().unwrap_or("None"));
    }
    out += "        }\n    }\n}\n";
    out += &an_enum("GapReason", "Why a gap is in a stream: `GapBegin.reason`.", &table.gap_constants());
    out += "\n/// Keys of `google.rpc.ErrorInfo.metadata`.\npub mod error_metadata {\n";
    for Constant { name, value, doc } in table.metadata_constants() {
        out += &comment("    ///", &doc);
        let _ = writeln!(out, "    pub const {name}: &str = \"{value}\";");
    }
    out + "}\n"
}

fn an_enum(name: &str, doc: &str, constants: &[Constant<'_>]) -> String {
    let mut out = format!(
        "\n/// {doc}\n#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]\n#[non_exhaustive]\npub enum {name} {{\n"
    );
    for constant in constants {
        out += &comment("    ///", &constant.doc);
        let _ = writeln!(out, "    {},", camel_case(&constant.name));
    }
    let _ = write!(out, "}}\n\nimpl {name} {{\n    /// Every reason.\n    pub const ALL: &[Self] = &[\n");
    for constant in constants {
        let _ = writeln!(out, "        Self::{},", camel_case(&constant.name));
    }
    out += "    ];\n\n    /// The text on the wire.\n    \
            pub const fn as_str(self) -> &'static str {\n        match self {\n";
    for constant in constants {
        arm(&mut out, constant, &format!("\"{}\"", constant.value));
    }
    out += "        }\n    }\n}\n";
    for (text, dereferenced) in [("str", "*self"), ("&str", "**self"), ("String", "*self")] {
        let _ = write!(
            out,
            "\nimpl PartialEq<{name}> for {text} {{\n    fn eq(&self, reason: &{name}) -> bool {{\n        \
             {dereferenced} == *reason.as_str()\n    }}\n}}\n"
        );
    }
    out
}

fn arm(out: &mut String, constant: &Constant<'_>, value: &str) {
    let _ = writeln!(out, "            Self::{} => {value},", camel_case(&constant.name));
}
