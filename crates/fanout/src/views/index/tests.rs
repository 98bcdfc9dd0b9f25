use kubefan_model::{
    GroupVersionResource, ResourceVersion,
    event::EventType,
    fields::FieldTable,
    selector::{FieldSelector, LabelSelector},
};
use proptest::prelude::*;

use super::*;

struct Pods {
    gvr: GroupVersionResource,
    table: FieldTable,
    parser: Arc<ObjectParser>,
}

impl Pods {
    fn new() -> Self {
        let gvr = GroupVersionResource::new("", "v1", "pods");
        let table = FieldTable::new(&gvr, true, &[]);
        let parser = Arc::new(ObjectParser::new(&table));
        Self { gvr, table, parser }
    }

    fn select(&self, namespace: &str, labels: &str, fields: &str) -> Selection {
        let labels = LabelSelector::parse(labels).unwrap();
        let fields = FieldSelector::parse(fields).unwrap();
        Selection::bind(namespace, "", labels, &fields, &self.table, self.parser.clone(), &self.gvr).unwrap()
    }

    fn pod(&self, namespace: &str, labels: &str, node: &str) -> Arc<Object> {
        let json = format!(
            r#"{{"metadata":{{"namespace":"{namespace}","name":"p","resourceVersion":"1","labels":{{{labels}}}}},"spec":{{"nodeName":"{node}"}}}}"#
        );
        Arc::new(self.parser.parse(json.as_bytes()).unwrap())
    }
}

fn changed(before: Arc<Object>, after: Arc<Object>) -> WatchEvent {
    WatchEvent::new(EventType::Modified, ResourceVersion::new(2).unwrap(), after, Some(before))
}

#[test]
fn only_views_that_an_event_may_concern_are_candidates() {
    let pods = Pods::new();
    let mut index = SelectorIndex::default();
    let selections: Vec<_> = (0..100).map(|node| pods.select("", "", &format!("spec.nodeName=n{node}"))).collect();
    for (id, selection) in selections.iter().enumerate() {
        index.insert(id, selection);
    }
    assert_eq!(index.insert(100, &pods.select("", "app!=web", "")), None);
    let mut candidates = Vec::new();
    index.candidates(&changed(pods.pod("a", "", "n1"), pods.pod("a", "", "n7")), &mut candidates);
    assert_eq!(candidates, [1, 7, 100]);
    index.remove(7);
    index.remove(100);
    index.candidates(&changed(pods.pod("a", "", "n1"), pods.pod("a", "", "n7")), &mut candidates);
    assert_eq!(candidates, [1]);
}

#[test]
fn a_view_is_filed_under_the_term_with_the_fewest_views() {
    let pods = Pods::new();
    let mut index = SelectorIndex::default();
    for id in 0..10 {
        index.insert(id, &pods.select("", "", "status.phase=Running"));
    }
    let selection = pods.select("", "", "spec.nodeName=n1,status.phase=Running");
    let nth = index.insert(10, &selection).unwrap();
    assert!(matches!(selection.equalities().nth(nth), Some(Equality::Field(_, "n1"))));
}

#[test]
fn a_view_is_not_filed_under_thousands_of_values() {
    let pods = Pods::new();
    let mut index = SelectorIndex::default();
    let values = |count: usize| (0..count).map(|value| format!("v{value}")).collect::<Vec<_>>().join(",");
    assert_eq!(index.insert(0, &pods.select("", &format!("app in ({})", values(2000)), "")), None);
    assert_eq!(index.insert(1, &pods.select("", &format!("app in ({})", values(100)), "")), Some(0));
    let both = pods.select("", &format!("app in ({}),tier=a", values(2000)), "");
    let nth = index.insert(2, &both).unwrap();
    assert!(matches!(both.equalities().nth(nth), Some(Equality::Label("tier", _))));
    let mut candidates = Vec::new();
    index.candidates(&changed(pods.pod("a", "", "n1"), pods.pod("a", r#""app":"v1""#, "n1")), &mut candidates);
    assert_eq!(candidates, [0, 1]);
    for view in 0..3 {
        index.remove(view);
    }
    index.candidates(&changed(pods.pod("a", "", "n1"), pods.pod("a", r#""app":"v1""#, "n1")), &mut candidates);
    assert!(candidates.is_empty());
}

proptest! {
    #[test]
    fn every_view_that_an_event_concerns_is_a_candidate(
        selectors in prop::collection::vec((0usize..3, 0usize..8, 0usize..5), 1..20),
        (from, to) in ((0usize..2, 0usize..4, 0usize..3), (0usize..2, 0usize..4, 0usize..3)),
        drop in prop::collection::vec(any::<bool>(), 20),
    ) {
        let pods = Pods::new();
        let namespaces = ["", "a", "b"];
        let labels = ["", "app=web", "app in (web,db)", "app!=web", "tier", "app=web,tier=x", "!app", "app notin (db)"];
        let fields = ["", "spec.nodeName=n1", "spec.nodeName!=n1", "spec.nodeName=", "metadata.name=p"];
        let sets = ["", r#""app":"web""#, r#""app":"db","tier":"x""#, r#""app":"web","tier":"x""#];
        let nodes = ["", "n1", "n2"];
        let pod = |(namespace, set, node): (usize, usize, usize)| pods.pod(["a", "b"][namespace], sets[set], nodes[node]);
        let mut index = SelectorIndex::default();
        let selections: Vec<_> =
            selectors.iter().map(|&(n, l, f)| pods.select(namespaces[n], labels[l], fields[f])).collect();
        for (id, selection) in selections.iter().enumerate() {
            index.insert(id, selection);
        }
        for id in (0..selections.len()).filter(|id| drop[*id]) {
            index.remove(id);
        }
        let event = changed(pod(from), pod(to));
        let mut candidates = Vec::new();
        index.candidates(&event, &mut candidates);
        for (id, selection) in selections.iter().enumerate() {
            let sees = event.transition(selection).is_some();
            prop_assert!(!drop[id] || !candidates.contains(&id), "a removed view is found");
            prop_assert!(drop[id] || !sees || candidates.contains(&id), "view {id} is missed");
        }
    }
}
