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
mod command_line;
mod conformance;
mod connections;
mod credentials;
mod demo;
mod deploy;
mod documented_commands;
mod documented_configuration;
mod encodings;
mod equivalence;
mod estimate;
mod examples;
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
mod languages;
mod managed_tls;
mod memory;
mod memory_limit;
mod metrics;
mod monitoring;
mod on_demand;
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
mod staleness;
mod subscribers;
mod tables;
mod tier_load;
mod traces;
mod two_tiers;
mod unread;
mod upstream_connections;
mod upstream_faults;
mod verify;

fn main() -> std::process::ExitCode {
    harness::run(&[
        alerts_fire::TESTS,
        audit_log::TESTS,
        authorization::admin::TESTS,
        authorization::crafted::TESTS,
        authorization::crafted_calls::TESTS,
        authorization::fleet::TESTS,
        authorization::matrix::TESTS,
        authorization::refusals::TESTS,
        authorization::revocation::TESTS,
        authorization::rights::TESTS,
        authorization::service_accounts::TESTS,
        authorization::setup::TESTS,
        backfill::TESTS,
        bad_input::TESTS,
        bad_start::TESTS,
        bench::TESTS,
        benchmarks::TESTS,
        check::TESTS,
        chart::TESTS,
        chart::accepted::TESTS,
        chart::rendered::TESTS,
        chart::wrong_values::TESTS,
        client_certificates::TESTS,
        clients::client_go::TESTS,
        clients::kube_rs::TESTS,
        clients::kubectl::TESTS,
        clients::python::TESTS,
        command_line::TESTS,
        conformance::REAL,
        conformance::SIMULATED,
        conformance::faults::TESTS,
        connections::TESTS,
        demo::TESTS,
        credentials::TESTS,
        deploy::TESTS,
        documented_commands::TESTS,
        documented_configuration::TESTS,
        encodings::TESTS,
        equivalence::TESTS,
        estimate::TESTS,
        examples::TESTS,
        examples::in_rust::TESTS,
        examples::pages::TESTS,
        failures::TESTS,
        fair_limits::TESTS,
        feature_gates::TESTS,
        freshness::TESTS,
        harness::process::TESTS,
        harness_works::TESTS,
        history::TESTS,
        http::TESTS,
        http::BROWSERS,
        http::HOSTILE,
        http::WEBSOCKET,
        http::LIMITS,
        image::TESTS,
        impersonation::TESTS,
        informer_start::TESTS,
        informers::TESTS,
        informers::calls::TESTS,
        informers::handler_latency::TESTS,
        informers::soak::TESTS,
        informers::tokens::TESTS,
        integrations::kopf::TESTS,
        integrations::operator::TESTS,
        integrations::prometheus::TESTS,
        integrations::state_metrics::TESTS,
        languages::TESTS,
        languages::cost::TESTS,
        languages::soak::TESTS,
        managed_tls::TESTS,
        memory::TESTS,
        memory_limit::TESTS,
        metrics::TESTS,
        monitoring::TESTS,
        on_demand::TESTS,
        open_files::TESTS,
        outages::TESTS,
        passthrough::TESTS,
        peers::TESTS,
        protobuf::TESTS,
        protobuf_grpc::TESTS,
        quiet::dynamic_informers::TESTS,
        quiet::failover::TESTS,
        quiet::kubectl_outage::TESTS,
        quiet::outage::TESTS,
        quiet::restarted_fleet::TESTS,
        quiet::starts::TESTS,
        quiet::state_metrics::TESTS,
        quiet::upgrade::TESTS,
        recovery::TESTS,
        relists::TESTS,
        reload::TESTS,
        restarts::TESTS,
        resume::TESTS,
        rollout::TESTS,
        schema_changes::TESTS,
        scopes::TESTS,
        selective_reads::TESTS,
        self_check::TESTS,
        serve::TESTS,
        staleness::TESTS,
        subscribers::TESTS,
        tables::TESTS,
        tier_load::TESTS,
        traces::TESTS,
        two_tiers::TESTS,
        unread::TESTS,
        upstream_connections::TESTS,
        upstream_faults::TESTS,
        verify::TESTS,
    ])
}
