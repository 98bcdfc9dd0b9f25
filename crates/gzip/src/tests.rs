//! Members read back by decoders that are not the compressor's library, and checksums compared with
//! those of the whole.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::io::{ErrorKind, Read};

use bytes::Bytes;
use flate2::read::{GzDecoder, MultiGzDecoder};
use miniz_oxide::{
    DataFormat, MZFlush,
    inflate::{
        decompress_to_vec,
        stream::{InflateState, inflate},
    },
};
use proptest::prelude::*;

use crate::*;

/// A watch event of about 3 KB, in which much repeats.
fn event(number: usize) -> Bytes {
    let mut line = format!(r#"{{"type":"MODIFIED","object":{{"metadata":{{"name":"web-{number}","managedFields":["#);
    for field in 0..40 {
        line += &format!(r#"{{"f:status":{{"k:{{\"type\":\"Ready-{field}\"}}":{{".":{{}},"f:type":{{}}}}}}}},"#);
    }
    (line + "{}]}}}\n").into()
}

/// Bytes that cannot be compressed.
fn noise(len: usize) -> Bytes {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    let next = |_| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[3]
    };
    (0..len).map(next).collect()
}

fn compressed(plain: impl Into<Bytes>) -> Piece {
    let piece = Compressor::new(Level::DEFAULT).compress(plain.into());
    assert!(!piece.is_stored());
    piece
}

/// Parts in several forms and sizes, with their plain bytes.
fn parts() -> Vec<(Bytes, Piece)> {
    let large: Bytes = (0..40).flat_map(event).collect();
    assert!(large.len() > 100_000);
    let plains = [event(1), event(2), Bytes::new(), noise(100), noise(70_000), large, Bytes::from_static(b"\n")];
    let mut compressor = Compressor::new(Level::DEFAULT);
    let forms =
        |plain: Bytes| [compressor.compress(plain.clone()), Piece::stored(plain.clone())].map(|p| (plain.clone(), p));
    plains.into_iter().flat_map(forms).collect()
}

fn deflate_of<'a>(pieces: impl IntoIterator<Item = &'a Piece>) -> Vec<u8> {
    pieces.into_iter().flat_map(Piece::wire).flatten().collect()
}

fn member<'a>(pieces: impl Iterator<Item = &'a Piece> + Clone) -> Vec<u8> {
    let checksum = pieces.clone().fold(Checksum::EMPTY, |sum, piece| sum.then(piece.checksum()));
    [&HEADER[..], &deflate_of(pieces), &end(checksum)].concat()
}

/// Decodes a complete member. The decoder compares the CRC-32 and the length.
fn decoded(member: &[u8]) -> Vec<u8> {
    let mut plain = Vec::new();
    let mut decoder = GzDecoder::new(member);
    decoder.read_to_end(&mut plain).unwrap();
    assert!(decoder.into_inner().is_empty(), "bytes after the member");

    let mut as_members = Vec::new();
    MultiGzDecoder::new(member).read_to_end(&mut as_members).unwrap();
    assert_eq!(as_members, plain);

    let deflate = &member[HEADER.len()..member.len() - 8];
    assert_eq!(decompress_to_vec(deflate).unwrap(), plain);
    plain
}

/// Returns what a decoder hands out of one piece alone.
fn decoded_alone(piece: &Piece) -> Vec<u8> {
    decoded(&member([piece].into_iter()))
}

#[test]
fn all_types_can_move_between_threads() {
    fn assert_send<T: Send + 'static>() {}
    assert_send::<Compressor>();
    assert_send::<Piece>();
}

#[test]
fn every_part_decodes_without_the_others() {
    for (plain, piece) in parts() {
        assert_eq!(decoded_alone(&piece), plain);
        assert_eq!(piece.checksum(), Checksum::of(&plain));
    }
}

#[test]
fn every_level_decodes() {
    let plain: Bytes = (0..30).flat_map(event).collect();
    for level in 1..=9 {
        let mut compressor = Compressor::new(Level::new(level).unwrap());
        // Also the second piece, which is made with used state.
        for _ in 0..2 {
            let piece = compressor.compress(plain.clone());
            assert_eq!(decoded_alone(&piece), plain);
            assert!(piece.wire_len() < plain.len() / 4, "{}", piece.wire_len());
        }
    }
    assert_eq!(Level::new(0), None);
    assert_eq!(Level::new(10), None);
}

#[test]
fn a_member_without_pieces_is_complete() {
    assert!(decoded(&member([].into_iter())).is_empty());
}

#[test]
fn a_piece_without_plain_bytes_has_no_bytes_on_the_wire() {
    let empty = [Piece::empty(), Piece::stored(Bytes::new()), Compressor::new(Level::DEFAULT).compress(Bytes::new())];
    for piece in &empty {
        assert_eq!(piece.wire_len(), 0);
        assert_eq!(piece.wire().count(), 0);
        assert!(piece.checksum().is_empty());
    }
    assert!(decoded(&member(empty.iter())).is_empty());
}

#[test]
fn the_slices_on_the_wire_are_the_joined_bytes() {
    for len in [1, 65_534, 65_535, 65_536, 131_070, 131_071] {
        let piece = Piece::stored(noise(len));
        assert_eq!(decoded_alone(&piece), noise(len));
        assert_eq!(piece.wire().count(), 2 * len.div_ceil(65_535) + 1);
    }
    for (plain, piece) in parts() {
        assert!(piece.wire().all(|slice| !slice.is_empty()));
        assert_eq!(deflate_of([&piece]), piece.to_bytes());
        assert_eq!(piece.to_bytes().len(), piece.wire_len());
        assert!(plain.is_empty() || piece.to_bytes().ends_with(&[0, 0, 0xff, 0xff]));
    }
}

#[test]
fn a_stored_piece_shares_the_plain_bytes() {
    let plain = noise(100_000);
    let piece = Piece::stored(plain.clone());
    let shared = |slice: &Bytes| plain.as_ptr_range().contains(&slice.as_ptr());
    assert_eq!(piece.wire().filter(shared).map(|slice| slice.len()).sum::<usize>(), plain.len());
}

#[test]
fn bytes_that_do_not_compress_are_stored() {
    let mut compressor = Compressor::new(Level::DEFAULT);
    assert!(compressor.compress(noise(5000)).is_stored());
    assert!(compressor.compress(Bytes::from_static(b"{}\n")).wire_len() <= 13);
    let piece = compressor.compress(event(1));
    assert!(!piece.is_stored());
    assert!(piece.wire_len() < event(1).len() / 3);
}

#[test]
fn a_decoder_has_every_whole_piece_at_every_cut() {
    let parts = [
        compressed(event(1)),
        Piece::stored(noise(700)),
        compressed(event(2)),
        Piece::empty(),
        Piece::stored(Bytes::from_static(b"{\"type\":\"BOOKMARK\"}\n")),
        compressed(event(3)),
    ];
    let plain: Vec<u8> = [event(1), noise(700), event(2), "{\"type\":\"BOOKMARK\"}\n".into(), event(3)].concat();
    let mut decoder = InflateState::new_boxed(DataFormat::Raw);
    let mut output = vec![0; plain.len() + 1];
    let mut have = 0;
    let mut whole = 0;
    for piece in &parts {
        for byte in &piece.to_bytes() {
            assert!(have >= whole, "{have} bytes, and the pieces before have {whole}");
            let result = inflate(&mut decoder, &[*byte], &mut output[have..], MZFlush::None);
            result.status.unwrap();
            assert_eq!(result.bytes_consumed, 1);
            have += result.bytes_written;
            assert_eq!(output[..have], plain[..have]);
        }
        whole += usize::try_from(piece.checksum().len()).unwrap();
        assert_eq!(have, whole, "at the end of a piece");
    }
    assert_eq!(whole, plain.len());
}

#[test]
fn a_member_that_is_cut_off_is_an_error_after_its_whole_pieces() {
    let whole = member([compressed(event(1)), Piece::stored(noise(50))].iter());
    let plain = [event(1), noise(50)].concat();
    for cut in 1..END_BYTES {
        let mut read = Vec::new();
        let error = GzDecoder::new(&whole[..whole.len() - cut]).read_to_end(&mut read).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
        assert_eq!(read, plain);
    }
}

#[test]
fn the_end_has_the_length_modulo_four_gib() {
    let mut sum = Checksum::of(b"abcde");
    for _ in 0..32 {
        sum = sum.then(sum);
    }
    let sum = sum.then(Checksum::of(b"xyz"));
    assert_eq!(sum.len(), (5 << 32) + 3);
    assert_eq!(end(sum)[6..], [3, 0, 0, 0]);
}

#[test]
fn a_range_that_ends_before_it_starts_has_no_checksum() {
    let first = Prefix::START.then(Checksum::of(b"a"));
    let second = first.then(Checksum::of(b"b"));
    let other = Prefix::START.then(Checksum::of(b"b"));
    assert_eq!(first.since(second), None);
    assert_eq!(first.since(other), None);
    assert_eq!(first.since(first), Some(Checksum::EMPTY));
}

/// Plain bytes of a piece, and whether they are stored.
fn plains() -> impl Strategy<Value = Vec<(bool, Vec<u8>)>> {
    let random = prop::collection::vec(any::<u8>(), 0..300);
    let repeated = (any::<u8>(), 0..3000_usize).prop_map(|(byte, len)| vec![byte; len]);
    let events = (0..1000_usize).prop_map(|number| event(number).to_vec());
    prop::collection::vec((any::<bool>(), prop_oneof![random, repeated, events]), 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, ..ProptestConfig::default() })]

    #[test]
    fn pieces_of_a_log_make_members_from_any_place_to_any_other(
        plains in plains(), from in any::<prop::sample::Index>(), to in any::<prop::sample::Index>(),
    ) {
        let mut compressor = Compressor::new(Level::DEFAULT);
        let mut prefixes = vec![Prefix::START];
        let mut pieces = Vec::new();
        for (is_stored, plain) in &plains {
            let plain = Bytes::from(plain.clone());
            let piece = if *is_stored { Piece::stored(plain) } else { compressor.compress(plain) };
            prefixes.push(prefixes[pieces.len()].then(piece.checksum()));
            pieces.push(piece);
        }
        let from = from.index(prefixes.len());
        let to = from + to.index(prefixes.len() - from);

        let plain: Vec<u8> = plains[from..to].iter().flat_map(|(_, plain)| plain.clone()).collect();
        let range = prefixes[to].since(prefixes[from]).unwrap();
        prop_assert_eq!(range, Checksum::of(&plain));

        let member = [&HEADER[..], &deflate_of(&pieces[from..to]), &end(range)].concat();
        prop_assert_eq!(decoded(&member), plain);
    }

    #[test]
    fn pieces_decode_in_any_order(order in Just(parts()).prop_shuffle()) {
        let plain: Vec<u8> = order.iter().flat_map(|(plain, _)| plain.clone()).collect();
        prop_assert_eq!(decoded(&member(order.iter().map(|(_, piece)| piece))), plain);
    }

    #[test]
    fn combined_checksums_are_those_of_the_whole(parts in prop::array::uniform3(prop::collection::vec(any::<u8>(), 0..500))) {
        let [a, b, c] = parts.each_ref().map(|part| Checksum::of(part));
        let whole = Checksum::of(&parts.concat());
        prop_assert_eq!(a.then(b).then(c), whole);
        prop_assert_eq!(a.then(b.then(c)), whole);
        prop_assert_eq!(a.then(Checksum::EMPTY), a);
        prop_assert_eq!(Checksum::EMPTY.then(a), a);
    }
}
