use super::*;

#[test]
fn an_id_is_as_it_is_shown() {
    for id in [0, 1, 0xdead_beef, u32::MAX] {
        assert_eq!(id_of(&text_of(id)), Some(id));
    }
    for text in ["", "1", "0000000G", "DEADBEEF", "+0000001", "000000001", "ä000000"] {
        assert_eq!(id_of(text), None, "{text}");
    }
}

#[test]
fn an_id_in_use_is_not_given_again_and_another_seed_gives_others() {
    let ids = |seed| {
        let mut known = Known::default();
        (0..1000).map(|_| known.next_id(seed)).collect::<HashSet<_>>()
    };
    assert_eq!(ids(1).len(), 1000);
    assert!(ids(1).is_disjoint(&ids(1 << 20)));
}

#[test]
fn texts_are_shared_and_go_with_their_last_watch() {
    let mut known = Known::default();
    let kept = known.text("kubelet/v1.35");
    assert!(Arc::ptr_eq(&kept, &known.text("kubelet/v1.35")));
    for number in 0..10_000 {
        known.text(&number.to_string());
    }
    assert!(known.texts.len() <= 2 * SWEPT_LEAST, "{}", known.texts.len());
    assert!(Arc::ptr_eq(&kept, &known.text("kubelet/v1.35")));
}
