//! Tests of the decoder of gzip bodies: it hands out events when they arrive, and reports every
//! fault of a body.

use std::io::Write;

use flate2::{Compression, write::GzEncoder};
use libtest_mimic::{Failed, Trial};

use crate::gzip_decoder::GzipDecoder;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        Trial::test("the_decoder_hands_out_each_event_when_its_last_byte_arrives", hands_out),
        Trial::test("the_decoder_detects::a_body_that_is_cut_off", detects_an_end_that_is_missing),
        Trial::test("the_decoder_detects::a_byte_that_is_damaged", detects_damage),
        Trial::test("the_decoder_detects::bytes_after_the_member", detects_what_follows),
    ]
}

/// Events of several lengths, some of which do not compress.
fn events() -> Vec<Vec<u8>> {
    let mut noise = 1_u32;
    let event = |len: usize| {
        let mut byte = || {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (noise >> 24) as u8
        };
        if len.is_multiple_of(2) { vec![b'a'; len] } else { (0..len).map(|_| byte()).collect() }
    };
    [1, 2, 300, 301, 70_000, 70_001].map(event).into()
}

/// A body in which each event ends with a flush, and the ends of the events in it.
fn body() -> (Vec<u8>, Vec<usize>) {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    let mut ends = Vec::new();
    for event in events() {
        encoder.write_all(&event).unwrap();
        encoder.flush().unwrap();
        ends.push(encoder.get_ref().len());
    }
    (encoder.finish().unwrap(), ends)
}

fn hands_out() -> Result<(), Failed> {
    let (body, ends) = body();
    let mut decoder = GzipDecoder::new();
    let mut events = events().into_iter();
    let mut arrived = Vec::new();
    for (at, byte) in body.iter().enumerate() {
        arrived.extend(decoder.decode(&[*byte])?);
        if ends.contains(&(at + 1)) {
            assert_eq!(Some(std::mem::take(&mut arrived)), events.next(), "at byte {at}");
        }
    }
    assert!(decoder.has_ended() && arrived.is_empty(), "the member has ended, and has no more");
    let all = GzipDecoder::new().decode(&body)?;
    assert_eq!(all, self::events().concat(), "at once");
    Ok(())
}

fn detects_an_end_that_is_missing() -> Result<(), Failed> {
    let (body, _) = body();
    for len in (body.len() - 20..body.len()).chain([0, 1, 10, 11, 1000]) {
        let mut decoder = GzipDecoder::new();
        decoder.decode(&body[..len])?;
        assert!(!decoder.has_ended(), "{len} bytes");
    }
    Ok(())
}

fn detects_damage() -> Result<(), Failed> {
    let (body, _) = body();
    // The header's time, extra flags and system have no meaning.
    for at in (0..4).chain(10..100).chain(body.len() - 100..body.len()) {
        let mut body = body.clone();
        body[at] ^= 1;
        let mut decoder = GzipDecoder::new();
        let is_whole = decoder.decode(&body).is_ok() && decoder.has_ended();
        assert!(!is_whole, "byte {at}");
    }
    Ok(())
}

fn detects_what_follows() -> Result<(), Failed> {
    let (mut body, _) = body();
    let mut decoder = GzipDecoder::new();
    decoder.decode(&body)?;
    assert!(decoder.decode(&[0]).is_err(), "in a frame of their own");
    body.push(0);
    assert!(GzipDecoder::new().decode(&body).is_err(), "in the last frame");
    Ok(())
}
