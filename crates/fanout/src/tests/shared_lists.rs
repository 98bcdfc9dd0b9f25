//! Lists as gzip bodies, whose chunks are compressed once for all readers.

use kubefan_cache::{
    RetainedLimits,
    kube_encoding::list::{ListEncoder, ListedResource},
};
use kubefan_gzip::Piece;
use kubefan_model::{
    format::{ContentCoding, Format},
    projection::Projection,
};

use super::*;
use crate::{
    SharedList,
    views::{
        selected_objects::Page,
        shared_lists::{ListKey, ListRequest},
        view::ViewKey,
    },
};

/// Objects of about three chunks.
const OBJECTS: usize = 6000;

fn list_page(cache: &Cache, labels: &str, page: Page) -> SharedList {
    let (store, version) = cache.hub.snapshot().unwrap();
    let resource = ListedResource {
        gvr: &cache.gvr,
        kind: "Pod",
        list_kind: "PodList",
        parser: &cache.parser,
        sample: store.iter().next().map(|object| &**object),
    };
    let format = Format::http(cache.parser.media(), Projection::default()).coded(ContentCoding::Gzip);
    let items = ListEncoder::new(&resource, format.clone());
    let key = ListKey { view: ViewKey { selection: cache.select(labels), format }, page };
    cache.hub.shared_list(ListRequest { key, store, version, items })
}

fn list(cache: &Cache) -> SharedList {
    list_page(cache, "", Page::default())
}

/// The chunks of a list, all compressed.
fn pieces(list: &SharedList) -> Vec<Piece> {
    while list.extent().is_none() {}
    (0..).map_while(|index| list.chunk(index)).map(|chunk| chunk.piece).collect()
}

/// Addresses of the compressed bytes: equal ones were compressed once.
fn addresses(pieces: &[Piece]) -> Vec<*const u8> {
    pieces.iter().map(|piece| piece.to_bytes().as_ptr()).collect()
}

fn plain(pieces: &[Piece]) -> String {
    let mut body = kubefan_gzip::HEADER.to_vec();
    let mut checksum = kubefan_gzip::Checksum::EMPTY;
    let comma = Piece::stored(Bytes::from_static(b","));
    for (index, piece) in pieces.iter().enumerate() {
        for piece in [Some(&comma).filter(|_| index > 0), Some(piece)].into_iter().flatten() {
            body.extend_from_slice(&piece.to_bytes());
            checksum = checksum.then(piece.checksum());
        }
    }
    body.extend_from_slice(&kubefan_gzip::end(checksum));
    std::io::read_to_string(flate2::read::GzDecoder::new(&*body)).unwrap()
}

fn filled(budgets: &ProcessBudgets) -> Cache {
    let mut cache = Cache::sharing(budgets, LIMITS);
    let names: Vec<_> = (0..OBJECTS).map(|number| format!("pod-{number:05}")).collect();
    let objects: Vec<_> = names.iter().map(|name| (name.as_str(), "web", 5)).collect();
    cache.list(&objects, 10);
    cache
}

/// The objects that a list must have, as JSON, separated by commas.
fn expected(cache: &Cache, range: std::ops::Range<usize>) -> String {
    let (store, _) = cache.hub.snapshot().unwrap();
    let objects = store.iter().skip(range.start).take(range.len());
    let objects: Vec<_> = objects.map(|object| String::from_utf8(object.bytes().to_vec()).unwrap()).collect();
    objects.join(",")
}

#[tokio::test(start_paused = true)]
async fn lists_of_one_state_share_their_chunks_and_have_its_objects() {
    let cache = filled(&ProcessBudgets::default());
    let lists = [list(&cache), list(&cache)];
    let [first, second] = lists.each_ref().map(pieces);
    assert!(first.len() > 2, "several chunks");
    assert_eq!(addresses(&first), addresses(&second));
    assert_eq!(plain(&first), expected(&cache, 0..OBJECTS));
}

#[tokio::test(start_paused = true)]
async fn a_later_list_compresses_only_the_chunk_with_the_change_and_has_the_change() {
    let mut cache = filled(&ProcessBudgets::default());
    let before = pieces(&list(&cache));
    cache.event(EventType::Modified, "pod-00001", "db", 20);
    let after = list(&cache);
    let after = pieces(&after);
    let changed: Vec<_> = (0..before.len()).filter(|i| addresses(&before)[*i] != addresses(&after)[*i]).collect();
    assert_eq!(changed, [0]);
    assert_eq!(plain(&after), expected(&cache, 0..OBJECTS));
}

#[tokio::test(start_paused = true)]
async fn a_list_reuses_chunks_of_one_that_no_reader_has_planned_yet() {
    let mut cache = filled(&ProcessBudgets::default());
    let before = pieces(&list(&cache));
    cache.event(EventType::Modified, "pod-00001", "db", 20);
    let unplanned = list(&cache);
    cache.event(EventType::Modified, "pod-00001", "web", 21);
    let after = pieces(&list(&cache));
    assert_eq!(addresses(&before)[1..], addresses(&after)[1..]);
    assert_eq!(plain(&after), expected(&cache, 0..OBJECTS));
    drop(unplanned);
}

#[tokio::test(start_paused = true)]
async fn objects_that_were_listed_again_are_compressed_again() {
    let mut cache = filled(&ProcessBudgets::default());
    let before = pieces(&list(&cache));
    let names: Vec<_> = (0..OBJECTS).map(|number| format!("pod-{number:05}")).collect();
    // The same versions: with a new schema their bytes may be others.
    let objects: Vec<_> = names.iter().map(|name| (name.as_str(), "db", 5)).collect();
    cache.list(&objects, 11);
    let after = pieces(&list(&cache));
    assert!(addresses(&before).iter().all(|address| !addresses(&after).contains(address)));
    assert_eq!(plain(&after), expected(&cache, 0..OBJECTS));
}

#[tokio::test(start_paused = true)]
async fn pages_have_their_objects_and_no_others() {
    let cache = filled(&ProcessBudgets::default());
    let page = |after: Option<&str>, limit| Page { after: after.map(|name| ObjectKey::new("ns", name)), limit };
    for (page, range) in [
        (page(None, Some(500)), 0..500),
        (page(Some("pod-00499"), Some(500)), 500..1000),
        (page(Some("pod-05899"), Some(500)), 5900..OBJECTS),
        (page(Some("pod-05999"), None), OBJECTS..OBJECTS),
    ] {
        let list = list_page(&cache, "app=web", page);
        assert_eq!(plain(&pieces(&list)), expected(&cache, range.clone()));
        assert_eq!(list.extent().unwrap().objects, range.len());
    }
}

#[tokio::test(start_paused = true)]
async fn without_room_in_the_budget_lists_stay_right_and_nothing_is_retained() {
    let budgets = ProcessBudgets::new(RetainedLimits { chunks_bytes_max: 0, ..RetainedLimits::default() });
    let cache = filled(&budgets);
    let first = list(&cache);
    let second = list(&cache);
    assert_eq!(plain(&pieces(&first)), expected(&cache, 0..OBJECTS));
    assert_eq!(plain(&pieces(&second)), expected(&cache, 0..OBJECTS));
    assert_eq!(cache.hub.budgets.chunks.used(), 0);
}
