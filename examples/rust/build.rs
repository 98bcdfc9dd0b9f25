//! Makes a function of each block in Rust on the pages (README.md, docs/ and the READMEs of the
//! clients), for the example `pages`. A block with a `main` is a program, any other the body of an
//! async function. A block after `<!-- excerpt: REASON -->` is left out.

use std::{
    env,
    error::Error,
    fmt::Write as _,
    fs, io,
    path::{Path, PathBuf},
};

/// From the folder of this package, where Cargo runs this. The path at compile time would be wrong
/// in another clone that shares the target directory.
const REPOSITORY: &str = "../..";
/// The address in the pages, as in their code. The example reads from that of its arguments.
const ADDRESS: &str = "127.0.0.1:7443";

fn main() -> Result<(), Box<dyn Error>> {
    let mut functions = String::new();
    let mut list = String::new();
    for page in pages()? {
        println!("cargo::rerun-if-changed={REPOSITORY}/{page}");
        for (number, block) in blocks(&fs::read_to_string(Path::new(REPOSITORY).join(&page))?).iter().enumerate() {
            let name = format!("{}_{number}", page.to_lowercase().replace(|c: char| !c.is_alphanumeric(), "_"));
            let code = block
                .replace(&format!("\"http://{ADDRESS}\""), "&format!(\"http://{}\", crate::address())")
                .replace(&format!("\"{ADDRESS}\""), "&crate::address()");
            let run = if code.contains("async fn main()") {
                let code = code.replace("async fn main()", "pub(crate) async fn main()");
                writeln!(functions, "mod {name} {{\n{code}}}")?;
                format!("Block::Program({name}::main)")
            } else {
                writeln!(functions, "async fn {name}(context: Context) -> Outcome {{")?;
                writeln!(functions, "let Context {{ client, kubefan, pods, version }} = context;\n{code}\nOk(())\n}}")?;
                format!("Block::Body(|context| Box::pin({name}(context)))")
            };
            writeln!(list, "(\"{page}\", {run}),")?;
        }
    }
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed={REPOSITORY}/docs");
    let text = format!("const BLOCKS: &[(&str, Block)] = &[\n{list}];\n\n{functions}");
    Ok(fs::write(PathBuf::from(env::var("OUT_DIR")?).join("pages.rs"), text)?)
}

/// The pages, relative to the repository, in order.
fn pages() -> io::Result<Vec<String>> {
    let mut found = vec!["README.md".to_owned()];
    for folder in ["docs", "docs/integrations", "docs/deployments", "docs/decisions", "clients"] {
        for entry in fs::read_dir(Path::new(REPOSITORY).join(folder))? {
            let name = entry?.file_name().to_string_lossy().into_owned();
            let page =
                if folder == "clients" { format!("{folder}/{name}/README.md") } else { format!("{folder}/{name}") };
            found.extend(page.ends_with(".md").then_some(page));
        }
    }
    found.sort();
    Ok(found)
}

/// The blocks in Rust of a page.
fn blocks(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut lines = text.lines();
    let mut before = "";
    while let Some(line) = lines.next() {
        if line.starts_with("```") {
            let block = lines.by_ref().take_while(|line| *line != "```").map(|line| format!("{line}\n")).collect();
            if line == "```rust" && !before.starts_with("<!-- excerpt: ") {
                found.push(block);
            }
        }
        before = line;
    }
    found
}
