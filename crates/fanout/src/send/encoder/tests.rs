use kubefan_model::{
    fields::FieldTable,
    object::ObjectParser,
    projection::{Parts, Projection},
};

use super::*;

fn pod(number: usize) -> Arc<Object> {
    let json = format!(r#"{{"metadata":{{"name":"pod-{number}","resourceVersion":"{number}"}},"spec":{{}}}}"#);
    Arc::new(ObjectParser::new(&FieldTable::default()).parse(json.as_bytes()).unwrap())
}

#[test]
fn projections_are_within_the_budget_and_those_of_dropped_objects_make_room() {
    const BYTES_MAX: usize = 1000;
    let budgets = Budgets { projected: Budget::alone(BYTES_MAX), ..Budgets::default() };
    let metadata = Projection::new(Parts::Metadata, false, false).unwrap();
    let encoder = Encoder::new(
        Format::new(metadata, false, Encoding::Json).unwrap(),
        &ResolvedResource::default(),
        None,
        budgets.clone(),
    );
    let known = |pod: &Arc<Object>| lock(&encoder.projected).objects.contains_key(pod.key());
    let gone: Vec<_> = (100..140).map(pod).collect();
    for pod in &gone {
        assert_eq!(encoder.snapshot_bytes(pod), encoder.snapshot_bytes(pod));
    }
    assert!(known(&gone[0]) && !known(&gone[39]), "the first were kept, and then there was no room");
    drop(gone);
    let live: Vec<_> = (200..240).map(pod).collect();
    for pod in &live {
        encoder.snapshot_bytes(pod);
    }
    assert!(live.iter().any(known) && budgets.projected.used() <= BYTES_MAX);
    drop(encoder);
    assert_eq!(budgets.projected.used(), 0);
}
