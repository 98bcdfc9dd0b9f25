//! The reasons in Python.

use std::fmt::Write as _;

use crate::table::{self, Constant, Table, comment};

pub(crate) const PATH: &str = "clients/python/src/kubefan/reasons.py";

pub(crate) fn render(table: &Table) -> String {
    let mut out = format!(
        "\"\"\"Reasons of errors and gaps. A newer kubefan may have others.\n\n\
         Generated from {} by kubefan-codegen.\n\"\"\"\n\n\
         from __future__ import annotations\n\nfrom typing import Final\n\n\
         #: The domain of kubefan's reasons in `google.rpc.ErrorInfo`.\nERROR_DOMAIN: Final = \"{}\"\n",
        table::PATH,
        table.domain
    );
    out += &class("ErrorReason", "Reasons of errors: `KubefanError.reason`.", &table.error_constants());
    out += &class("GapReason", "Reasons of gaps: `GapBegin.reason`.", &table.gap_constants());
    out + &class("ErrorMetadata", "Keys of `KubefanError.metadata`.", &table.metadata_constants())
}

fn class(name: &str, doc: &str, constants: &[Constant<'_>]) -> String {
    let mut out = format!("\n\nclass {name}:\n    \"\"\"{doc}\"\"\"\n\n");
    for Constant { name, value, doc } in constants {
        out += &comment("    #:", doc);
        let _ = writeln!(out, "    {name}: Final = \"{value}\"");
    }
    out
}
