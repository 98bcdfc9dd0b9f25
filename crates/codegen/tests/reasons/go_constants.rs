//! The reasons in Go.

use std::fmt::Write as _;

use crate::table::{self, Constant, Table, camel_case, comment};

pub(crate) const PATH: &str = "clients/go/reasons.go";

/// Words that Go writes in capitals.
const INITIALISMS: [&str; 2] = ["Tls", "Grpc"];

pub(crate) fn render(table: &Table) -> String {
    let mut out = format!(
        "// Code generated from {} by kubefan-codegen. DO NOT EDIT.\n\npackage kubefan\n\n\
         // ErrorDomain is the google.rpc.ErrorInfo domain of kubefan's reasons.\n\
         const ErrorDomain = \"{}\"\n",
        table::PATH,
        table.domain
    );
    out +=
        &block("Reason", "Reasons of errors: Error.Reason. A newer kubefan may have others.", &table.error_constants());
    out +=
        &block("GapReason", "Reasons of gaps: Item.Reason. A newer kubefan may have others.", &table.gap_constants());
    out + &block("Metadata", "Keys of Error.Metadata.", &table.metadata_constants())
}

fn block(prefix: &str, doc: &str, constants: &[Constant<'_>]) -> String {
    let mut out = format!("\n// {doc}\nconst (\n");
    for (number, Constant { name, value, doc }) in constants.iter().enumerate() {
        let mut name = camel_case(name);
        for word in INITIALISMS {
            name = name.replace(word, &word.to_uppercase());
        }
        let name = format!("{prefix}{name}");
        if number > 0 {
            out.push('\n');
        }
        out += &comment("\t//", &format!("{name}: {}", doc.replace('`', "")));
        let _ = writeln!(out, "\t{name} = \"{value}\"");
    }
    out + ")\n"
}
