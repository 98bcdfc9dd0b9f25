//! The reasons in TypeScript.

use std::fmt::Write as _;

use crate::table::{self, Constant, Table, comment};

pub(crate) const PATH: &str = "clients/typescript/src/reasons.ts";

pub(crate) fn render(table: &Table) -> String {
    let mut out = format!(
        "// Generated from {} by kubefan-codegen.\n\n\
         /** The domain of kubefan's reasons in `google.rpc.ErrorInfo`. */\n\
         export const ERROR_DOMAIN = \"{}\";\n",
        table::PATH,
        table.domain
    );
    let newer = "A newer kubefan may have others.";
    out +=
        &object("ErrorReason", &format!("Reasons of errors: `KubefanError.reason`. {newer}"), &table.error_constants());
    out += &object("GapReason", &format!("Reasons of gaps: `GapBegin.reason`. {newer}"), &table.gap_constants());
    out + &object("ErrorMetadata", "Keys of `KubefanError.metadata`.", &table.metadata_constants())
}

fn object(name: &str, doc: &str, constants: &[Constant<'_>]) -> String {
    let mut out = format!("\n/** {doc} */\nexport const {name} = {{\n");
    for Constant { name, value, doc } in constants {
        let _ = write!(out, "  /**\n{}   */\n  {name}: \"{value}\",\n", comment("   *", doc));
    }
    out + "} as const;\n"
}
