//! Runs the blocks in Rust of the pages, which are compiled with it: build.rs makes a function of
//! each.
//!
//! cargo run --example pages                            # the pages, and how many blocks each has
//! cargo run --example pages -- PAGE NUMBER [ADDRESS]   # runs a block; the first one is 0
//!
//! Reads from kubefan on 127.0.0.1:7443, such as `cargo run -- demo --duration 0`.
#![allow(clippy::all, unused, reason = "a page shows a part of a program")]

use std::{collections::BTreeMap, env, error::Error, pin::Pin, sync::Arc, time::Duration};

use kubefan_client::{
    Client, ClientOptions, Encoding, FakeListWatch, HandlerFuncs, IN_CLUSTER_ADDRESS, ListWatch, Object, OnExpired,
    Parts, Projection, SharedInformer, Target, WatchItem, WatchOptions, WorkQueue, http,
};

type Outcome = Result<(), Box<dyn Error>>;

enum Block {
    /// The `main` of a program.
    Program(fn() -> Outcome),
    /// The body of a function.
    Body(fn(Context) -> Pin<Box<dyn Future<Output = Outcome>>>),
}

/// Variables that the body of a function uses.
struct Context {
    /// The client by the names that the pages give it.
    client: Client,
    kubefan: Client,
    pods: SharedInformer<Pod>,
    /// The version of a write.
    version: String,
}

/// The pod type of the pages.
#[derive(serde::Deserialize)]
struct Pod {
    spec: Spec,
}

#[derive(serde::Deserialize)]
#[serde(rename_all = "camelCase")]
struct Spec {
    #[serde(default)]
    node_name: String,
}

/// The work of a worker.
fn reconcile(_: Option<Arc<Object<Pod>>>) -> Result<(), String> {
    Ok(())
}

fn address() -> String {
    env::args().nth(3).unwrap_or("127.0.0.1:7443".into())
}

include!(concat!(env!("OUT_DIR"), "/pages.rs"));

fn main() -> Outcome {
    let Some(page) = env::args().nth(1) else {
        let mut counts = BTreeMap::<&str, usize>::new();
        for (page, _) in BLOCKS {
            *counts.entry(page).or_default() += 1;
        }
        for (page, count) in &counts {
            println!("{page} {count}");
        }
        return Ok(());
    };
    let number: usize = env::args().nth(2).ok_or("the number of the block is missing")?.parse()?;
    let mut blocks = BLOCKS.iter().filter(|(name, _)| *name == page);
    match &blocks.nth(number).ok_or("there is no such block")?.1 {
        Block::Program(main) => main(),
        Block::Body(body) => tokio::runtime::Runtime::new()?.block_on(async {
            let client = Client::connect(&address(), &ClientOptions::default()).await?;
            let pods = SharedInformer::new(ListWatch::new(client.clone(), "pods", "", ""));
            body(Context { kubefan: client.clone(), client, pods, version: "1".into() }).await
        }),
    }
}
