//! Tests of the decoder and of bodies, with members that another library has made.

#![allow(clippy::unwrap_used, reason = "in a test a panic is the report")]

use std::io::Write;

use flate2::{Compression, GzBuilder, write::GzEncoder};
use futures::{FutureExt, StreamExt, TryStreamExt, stream};
use proptest::prelude::*;

use super::*;
use crate::{BodyError, Compressor, HEADER, Level, PlainBody, UnknownCoding};

fn member(plain: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(plain).unwrap();
    encoder.finish().unwrap()
}

/// A text of many different lines.
fn text(len: usize) -> Vec<u8> {
    (0..).flat_map(|number: u32| format!("{{\"number\":{number}}}\n").into_bytes()).take(len).collect()
}

/// Decodes what is received so far.
fn drain(decoder: &mut Decoder) -> Result<Vec<u8>, GzipError> {
    let mut plain = Vec::new();
    while let Some(slice) = decoder.next_slice()? {
        assert!((1..=SLICE_BYTES_MAX).contains(&slice.len()), "{}", slice.len());
        plain.extend_from_slice(&slice);
    }
    Ok(plain)
}

/// Decodes a whole body that is received in these chunks.
fn decode<'a>(chunks: impl IntoIterator<Item = &'a [u8]>) -> Result<Vec<u8>, GzipError> {
    let mut decoder = Decoder::new();
    let mut plain = Vec::new();
    for chunk in chunks {
        decoder.push(Bytes::copy_from_slice(chunk));
        plain.extend(drain(&mut decoder)?);
    }
    decoder.finish().map(|()| plain)
}

#[test]
fn a_body_that_is_cut_off_is_an_error_after_its_plain_bytes_unless_a_member_ends_there() {
    let parts = [text(300), Vec::new(), b"x".to_vec(), text(40)];
    let members = parts.each_ref().map(|part| member(part));
    let body = members.concat();
    let plain = parts.concat();
    let ends: Vec<usize> = (0..=members.len()).map(|count| members[..count].concat().len()).collect();
    for cut in 0..=body.len() {
        let mut decoder = Decoder::new();
        let mut received = Vec::new();
        for byte in &body[..cut] {
            decoder.push(Bytes::copy_from_slice(&[*byte]));
            received.extend(drain(&mut decoder).unwrap());
        }
        assert!(plain.starts_with(&received));
        let whole = ends.iter().filter(|end| **end <= cut).count() - 1;
        assert!(received.len() >= parts[..whole].concat().len(), "the plain bytes of {whole} members, at {cut}");
        let expected = if ends.contains(&cut) { Ok(()) } else { Err(GzipError::CutOff) };
        assert_eq!(decoder.finish(), expected, "{cut}");
        assert_eq!(decode([&body[..cut]]).err(), expected.err(), "{cut}, in one chunk");
    }
}

#[test]
fn all_that_the_server_has_flushed_is_decoded() {
    let lens = [1, 100, SLICE_BYTES_MAX - 1, SLICE_BYTES_MAX, SLICE_BYTES_MAX + 1, 3 * SLICE_BYTES_MAX, 100_000];
    // In one member, as through a proxy that compresses.
    let mut decoder = Decoder::new();
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    for len in lens {
        encoder.write_all(&text(len)).unwrap();
        encoder.flush().unwrap();
        decoder.push(std::mem::take(encoder.get_mut()).into());
        assert!(drain(&mut decoder).unwrap() == text(len), "{len}");
    }
    // As kubefan sends pieces.
    let mut decoder = Decoder::new();
    decoder.push(Bytes::from_static(&HEADER));
    assert_eq!(drain(&mut decoder), Ok(Vec::new()));
    for len in lens {
        decoder.push(Compressor::new(Level::DEFAULT).compress(text(len).into()).to_bytes());
        assert!(drain(&mut decoder).unwrap() == text(len), "{len}");
    }
    // A member per flush, as kube-apiserver 1.37 sends watches.
    let mut decoder = Decoder::new();
    for len in lens {
        decoder.push(member(&text(len)).into());
        assert!(drain(&mut decoder).unwrap() == text(len), "{len}");
        assert!(decoder.member.is_none(), "a quiet watch holds no state");
        assert_eq!(decoder.finish(), Ok(()));
    }
}

#[test]
fn a_header_with_all_optional_parts_is_read() {
    let header = GzBuilder::new().filename("a").comment("b").extra(vec![1; 300]).mtime(7);
    let mut encoder = header.write(Vec::new(), Compression::fast());
    encoder.write_all(b"plain").unwrap();
    let body = encoder.finish().unwrap();
    assert_eq!(decode(body.chunks(1)).unwrap(), b"plain");
}

#[test]
fn only_members_may_follow_a_member() {
    let whole = member(b"{}\n");
    for rest in [&b"{}\n"[..], &[0], &[0; 100], &whole[1..]] {
        let body = [&whole[..], rest].concat();
        let result = decode([&body[..]]);
        // One byte may still be the start of a header.
        assert!(matches!(result, Err(GzipError::Broken(_) | GzipError::CutOff)), "{rest:?}: {result:?}");
        assert_eq!(rest.len() > 1, matches!(result, Err(GzipError::Broken(_))), "{rest:?}: {result:?}");
    }
}

#[test]
fn a_checksum_or_length_that_differs_is_an_error() {
    let whole = member(&text(100));
    for back in 1..=8 {
        let mut body = whole.clone();
        let at = body.len() - back;
        body[at] ^= 1;
        assert!(matches!(decode([&body[..]]), Err(GzipError::Broken(_))), "{back}");
    }
}

/// A hundred MiB in 100 KB. Its reader can stop after the first slice.
#[test]
fn a_bomb_is_decoded_in_slices_and_only_on_demand() {
    const PLAIN: usize = 100 << 20;
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    for _ in 0..PLAIN >> 20 {
        encoder.write_all(&vec![b' '; 1 << 20]).unwrap();
    }
    let bomb = encoder.finish().unwrap();
    assert!(bomb.len() < 1 << 20, "{}", bomb.len());
    let mut decoder = Decoder::new();
    decoder.push(bomb.into());
    let mut plain = 0;
    while let Some(slice) = decoder.next_slice().unwrap() {
        plain += slice.len();
        assert!(slice.len() <= SLICE_BYTES_MAX && decoder.output.len() == SLICE_BYTES_MAX);
        let state = decoder.member.as_ref();
        assert!(state.is_none_or(|state| state.total_out() == plain as u64), "nothing is decoded ahead");
    }
    assert_eq!((plain, decoder.finish()), (PLAIN, Ok(())));
}

type Chunk = Result<Bytes, &'static str>;

/// The chunks of a body with a `Content-Encoding`.
fn body(chunks: Vec<Chunk>, coding: Option<&str>) -> Result<Vec<u8>, BodyError<&'static str>> {
    let body = PlainBody::new(stream::iter(chunks), coding.map(str::as_bytes)).unwrap();
    let chunks = body.map_ok(|chunk| chunk.to_vec()).try_concat();
    chunks.now_or_never().unwrap()
}

#[test]
fn a_body_is_decoded_as_its_header_says() {
    let plain = text(50_000);
    let whole = member(&plain);
    let chunks = |body: &[u8]| body.chunks(1000).map(|chunk| Ok(Bytes::copy_from_slice(chunk))).collect::<Vec<_>>();
    for coding in ["gzip", "GZIP", " x-gzip "] {
        assert!(body(chunks(&whole), Some(coding)).unwrap() == plain, "{coding}");
    }
    for coding in [None, Some(""), Some("identity")] {
        assert!(body(chunks(&whole), coding).unwrap() == whole, "{coding:?}");
    }
    for coding in ["br", "gzip, gzip", "deflate", "zstd"] {
        let body = PlainBody::new(stream::iter(chunks(&whole)), Some(coding.as_bytes()));
        assert_eq!(body.err(), Some(UnknownCoding(coding.to_owned())));
    }
    assert_eq!(body(Vec::new(), Some("gzip")), Ok(Vec::new()));
}

#[test]
fn the_plain_bytes_before_an_error_arrive_first() {
    let whole = Bytes::from(member(b"first"));
    let next = |chunks: Vec<Chunk>| {
        let mut body = PlainBody::new(stream::iter(chunks), Some(b"gzip")).unwrap();
        assert_eq!(body.next().now_or_never().unwrap().unwrap().unwrap(), "first");
        body.next().now_or_never().unwrap()
    };
    assert_eq!(next(vec![Ok(whole.clone()), Err("gone")]), Some(Err(BodyError::Chunks("gone"))));
    assert_eq!(next(vec![Ok(whole.slice(..whole.len() - 1))]), Some(Err(BodyError::Gzip(GzipError::CutOff))));
    let broken = next(vec![Ok(whole.clone()), Ok(Bytes::from_static(b"not gzip"))]);
    assert!(matches!(broken, Some(Err(BodyError::Gzip(GzipError::Broken(_))))), "{broken:?}");
    assert_eq!(next(vec![Ok(whole)]), None);
}

#[test]
fn a_decoder_can_move_between_threads() {
    fn assert_send<T: Send + 'static>() {}
    assert_send::<Decoder>();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_members_in_any_chunks_are_their_plain_bytes(
        parts in prop::collection::vec((0..40_000_usize).prop_map(text), 0..6),
        sizes in prop::collection::vec(1..5000_usize, 1..10),
    ) {
        let body: Vec<u8> = parts.iter().flat_map(|part| member(part)).collect();
        let mut rest = &body[..];
        let mut chunks = Vec::new();
        for size in sizes.iter().cycle() {
            if rest.is_empty() {
                break;
            }
            let chunk;
            (chunk, rest) = rest.split_at((*size).min(rest.len()));
            chunks.push(chunk);
        }
        prop_assert_eq!(decode(chunks), Ok(parts.concat()));
    }

    #[test]
    fn no_bytes_make_it_panic(body in prop::collection::vec(any::<u8>(), 0..300), size in 1..50_usize) {
        let _ = decode(body.chunks(size));
        let _ = decode([&HEADER[..], &body]);
    }
}
