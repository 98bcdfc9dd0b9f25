use std::sync::Arc;

use kubefan_model::{
    GroupVersionResource,
    fields::FieldTable,
    format::Encoding,
    object::ObjectParser,
    projection::{Parts, Projection},
    selector::{FieldSelector, LabelSelector, SELECTOR_BYTES_MAX},
};

use super::*;

fn select(labels: &str) -> Selection {
    let gvr = GroupVersionResource::new("", "v1", "pods");
    let table = FieldTable::new(&gvr, true, &[]);
    let labels = LabelSelector::parse(labels).unwrap();
    let parser = Arc::new(ObjectParser::new(&table));
    Selection::bind("", "", labels, &FieldSelector::default(), &table, parser, &gvr).unwrap()
}

/// A selector of almost the greatest length, with as many values as are allowed. No two numbers
/// have a value in common.
fn long(number: usize) -> String {
    let values: Vec<_> = (0..2000).map(|value| format!("{number:03}{value:04}")).collect();
    format!("app in ({})", values.join(","))
}

#[test]
fn many_long_selectors_take_a_few_times_their_text() {
    let budget = Budget::alone(usize::MAX);
    let selections = Selections::new(budget.clone());
    let mut index = super::super::index::SelectorIndex::default();
    let mut held = Vec::new();
    let mut text_bytes = 0;
    for number in 0..500 {
        let text = long(number);
        assert!(text.len() > SELECTOR_BYTES_MAX - 400 && text.len() <= SELECTOR_BYTES_MAX);
        text_bytes += text.len();
        let selection = selections.share(select(&text), None).unwrap();
        index.insert(number, &selection);
        held.push((selections.take_view(&selection, &Format::default(), None).unwrap(), selection));
    }
    assert!(budget.used() <= 4 * text_bytes, "{} bytes for {text_bytes} of text", budget.used());
    assert!(index.bytes() <= 500 * 100, "{} bytes of the index", index.bytes());
    for number in 0..500 {
        index.remove(number);
    }
    assert!(index.bytes() < 1 << 10, "{} bytes are left in the index", index.bytes());
    drop(held);
    assert_eq!(budget.used(), 0, "what is not used is given back");
}

#[test]
fn equal_selectors_share_their_memory_and_those_without_room_are_refused() {
    let budget = Budget::alone(64 << 10);
    let selections = Selections::new(budget.clone());
    let one = selections.share(select(&long(1)), None).unwrap();
    let used = budget.used();
    let again: Vec<_> = (0..100).map(|_| selections.share(select(&long(1)), None).unwrap()).collect();
    assert!(
        again
            .iter()
            .all(|again| again.spec().labels.requirements().as_ptr() == one.spec().labels.requirements().as_ptr())
    );
    assert_eq!(budget.used(), used, "equal ones cost nothing");
    let others: Vec<_> = (2..).map_while(|number| selections.share(select(&long(number)), None).ok()).collect();
    assert_eq!(others.len(), 1, "two have room");
    let refusal = selections.share(select(&long(9)), None).unwrap_err();
    assert!(matches!(&refusal, Refusal::Exhausted(why) if why.contains("limits.selectorMemoryMax")), "{refusal}");
    let small = Selections::new(Budget::alone(size_of::<View>()));
    assert!(
        matches!(small.take_view(&select("a in (b,c)"), &Format::default(), None), Err(Refusal::Exhausted(_))),
        "its place counts"
    );
    drop(one);
    drop(again);
    assert!(selections.share(select(&long(9)), None).is_ok(), "the last watch gave back the room");
}

#[test]
fn the_selectors_of_one_tenant_leave_room_for_those_of_others() {
    let selections = Selections::new(Budget::alone(4 << 20));
    let of = |user: &str, connection| Some(Holder::new(connection, None).identified(user, None));
    let mut numbers = 0..;
    let mut fill = |connection| {
        let next = numbers.by_ref();
        next.map_while(|number| selections.share(select(&long(number)), of("greedy", connection)).ok())
            .collect::<Vec<_>>()
    };
    let held: Vec<_> = (0..10).flat_map(&mut fill).collect();
    assert!(held.len() > 20, "{} have room while nobody else wants it", held.len());
    for number in 0..20 {
        selections.share(select(&format!("app=v{number}")), of("honest", 100)).unwrap();
    }
}

#[test]
fn selectors_that_are_gone_are_forgotten() {
    let selections = Selections::new(Budget::alone(usize::MAX));
    for number in 0..10_000 {
        selections.share(select(&format!("app=v{number}")), None).unwrap();
    }
    let known = selections.known.lock().unwrap();
    assert!(known.selections.len() <= 2 * SWEPT_LEAST, "{} are known", known.selections.len());
}

/// A program that lists again and again, while no watch has its selection.
#[test]
fn equal_selectors_that_are_gone_are_forgotten() {
    let selections = Selections::new(Budget::alone(usize::MAX));
    for _ in 0..100 {
        selections.share(select("app=web"), None).unwrap();
    }
    let known = selections.known.lock().unwrap();
    assert_eq!(known.selections.values().map(Vec::len).sum::<usize>(), 1);
}

#[test]
fn the_field_mask_of_a_view_counts() {
    let mask = |number: usize| {
        let path = |path: usize| {
            (0..32).map(|name| if name == 0 { format!("{number}-{path}") } else { "a".to_owned() }).collect::<Vec<_>>()
        };
        let paths: Vec<String> = (0..64).map(|number| path(number).join(".")).collect();
        let projection = Projection::new(Parts::Fields(&paths), false, false).unwrap();
        Format::new(projection, true, Encoding::Json).unwrap()
    };
    let selections = Selections::new(Budget::alone(16 << 20));
    let of = |user: &str, connection| Some(Holder::new(connection, None).identified(user, None));
    let take = |number, holder| selections.take_view(&select("a=b"), &mask(number), holder);
    let held: Vec<_> = (0..1000).map_while(|number| take(number, of("greedy", 1)).ok()).collect();
    assert!((50..200).contains(&held.len()), "{} masks of 2,048 names", held.len());
    assert!(take(1000, of("other", 2)).is_ok(), "room is left for another tenant");
    drop(held);
    assert_eq!(selections.budget.used(), 0);
}
