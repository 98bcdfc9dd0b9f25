//! The integration tests: the real kubefan binary and the library against a real kube-apiserver.
//! All of them are one binary, so that it links once and most tests share one apiserver. `harness`
//! explains how to write and register a test.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

mod alerts_fire;
mod audit_log;
mod authorization;
mod backfill;
mod bad_input;
mod bad_start;
mod bench;
mod benchmarks;
mod chart;
mod check;
mod client_certificates;
mod clients;
mod closed_connections;
mod command_line;
mod conformance;
mod connections;
mod credentials;
mod decoders;
mod demo;
mod deploy;
mod documented_commands;
mod documented_configuration;
mod environment_proxy;
mod equivalence;
mod estimate;
mod examples;
mod failing_lists;
mod failures;
mod fair_limits;
mod feature_gates;
mod freshness;
mod harness;
mod harness_works;
mod history;
mod http;
mod image;
mod impersonation;
mod informer_start;
mod informers;
mod integrations;
mod kubeconfig_forms;
mod languages;
mod managed_tls;
mod memory;
mod memory_limit;
mod metrics;
mod monitoring;
mod not_cacheable;
mod on_demand;
mod one_version;
mod open_files;
mod outages;
mod passthrough;
mod peers;
mod protobuf;
mod protobuf_grpc;
mod quiet;
mod recovery;
mod relists;
mod reload;
mod restarts;
mod resume;
mod rollout;
mod schema_changes;
mod scopes;
mod selective_reads;
mod self_check;
mod serve;
mod shape_changes;
mod staleness;
mod state_on_disk;
mod subscribers;
mod tables;
mod tenants;
mod tier_load;
mod traces;
mod two_tiers;
mod unread;
mod upstream_connections;
mod upstream_faults;
mod verify;

fn main() -> std::process::ExitCode {
    harness::run()
}
