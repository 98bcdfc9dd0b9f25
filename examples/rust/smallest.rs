//! Prints the key of every pod, of the present ones and then of each new one, until Ctrl-C:
//! cargo run --example smallest
//! Reads from kubefan on 127.0.0.1:7443, such as `cargo run -- demo --duration 0`.
use kubefan_client::{Client, ClientOptions, ListWatch, RawJson, SharedInformer};

async fn run() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).unwrap_or("127.0.0.1:7443".into());
    let kubefan = Client::connect(&address, &ClientOptions::default()).await?;
    let pods = SharedInformer::<RawJson>::new(ListWatch::new(kubefan, "pods", "", ""));
    pods.on_error(|error| eprintln!("{error}"));
    pods.add_event_handler(pods.handler().on_add(|pod, _| println!("{}", pod.key())))?;
    Ok(pods.run(tokio::signal::ctrl_c()).await?)
}

#[tokio::main]
async fn main() -> Result<(), String> {
    run().await.map_err(|error| error.to_string())
}
