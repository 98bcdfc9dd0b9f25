//! Reads and writes protobuf's wire format, as far as Kubernetes uses it: varints and
//! length-delimited fields.
//!
//! Only a few fields of an object are read, and all others must keep their bytes, so nothing is
//! decoded into types. A message is a sequence of fields, most of which are skipped. The hazard is
//! hostile input: every read stays within the given bytes, every step consumes at least one byte,
//! and no recursion depends on the input. So any input ends, in fields or in an error.

use bytes::BufMut;

/// The bytes are not a protobuf message, or not the expected one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("not Kubernetes protobuf: {0}")]
pub struct Malformed(pub(crate) &'static str);

/// Maximum length of a varint: 64 bits in groups of seven.
const VARINT_BYTES_MAX: usize = 10;

/// One field of a message, undecoded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Field<'a> {
    /// Number of the field.
    pub number: u32,
    /// Value of the field.
    pub value: Value<'a>,
    /// The whole field: key, length and value.
    pub bytes: &'a [u8],
}

/// The value of a field.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Value<'a> {
    /// A varint, decoded and as written.
    Varint(u64, &'a [u8]),
    /// A string, bytes, or a message.
    Bytes(&'a [u8]),
    /// Four or eight bytes. No field that kubefan reads has this type.
    Fixed,
}

/// Iterates over the fields of a message. Ends after an error.
#[derive(Debug, Clone)]
pub struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    /// The fields of a message, given without its key and length.
    pub fn of(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    fn varint(&mut self) -> Result<(u64, &'a [u8]), Malformed> {
        let mut number = 0;
        let start = self.rest;
        for (at, byte) in start.iter().enumerate().take(VARINT_BYTES_MAX) {
            number |= u64::from(byte & 0x7f) << (7 * at);
            if byte & 0x80 == 0 {
                let (bytes, rest) = start.split_at(at + 1);
                self.rest = rest;
                return Ok((number, bytes));
            }
        }
        Err(Malformed(if start.len() < VARINT_BYTES_MAX { "cut off" } else { "a number of more than 64 bits" }))
    }

    fn take(&mut self, len: u64) -> Result<&'a [u8], Malformed> {
        let split = usize::try_from(len).ok().and_then(|len| self.rest.split_at_checked(len));
        let (taken, rest) = split.ok_or(Malformed("cut off"))?;
        self.rest = rest;
        Ok(taken)
    }

    fn field(&mut self) -> Result<Field<'a>, Malformed> {
        let start = self.rest;
        let (key, _) = self.varint()?;
        let number = u32::try_from(key >> 3).ok().filter(|number| *number > 0);
        let number = number.ok_or(Malformed("a field without a number"))?;
        let value = match key & 7 {
            0 => {
                let (number, bytes) = self.varint()?;
                Value::Varint(number, bytes)
            }
            1 => self.take(8).map(|_| Value::Fixed)?,
            2 => {
                let (len, _) = self.varint()?;
                Value::Bytes(self.take(len)?)
            }
            5 => self.take(4).map(|_| Value::Fixed)?,
            // Groups. Kubernetes has never used them.
            _ => return Err(Malformed("a field of an unknown type")),
        };
        Ok(Field { number, value, bytes: &start[..start.len() - self.rest.len()] })
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<Field<'a>, Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.rest = &[];
        }
        Some(field)
    }
}

/// The last length-delimited field with this number. If a field is repeated, the last one counts.
pub fn bytes_field(message: &[u8], number: u32) -> Result<Option<&[u8]>, Malformed> {
    let mut found = None;
    for field in Fields::of(message) {
        let field = field?;
        if field.number == number
            && let Value::Bytes(bytes) = field.value
        {
            found = Some(bytes);
        }
    }
    Ok(found)
}

/// The message with `bytes` as the value of the field at `path`, a list of field numbers. Lengths
/// are adjusted, and repeated fields are all replaced. Unchanged if there is no field at `path`.
pub fn replaced(message: &[u8], path: &[u32], bytes: &[u8]) -> Result<Vec<u8>, Malformed> {
    edited(message, path, Some(bytes))
}

/// The message without the field at `path`, a list of field numbers. Lengths are adjusted, and
/// repeated fields are all left out.
pub fn without(message: &[u8], path: &[u32]) -> Result<Vec<u8>, Malformed> {
    edited(message, path, None)
}

/// The message with another value of the field at `path`, or without the field.
fn edited(message: &[u8], path: &[u32], value: Option<&[u8]>) -> Result<Vec<u8>, Malformed> {
    let Some((first, rest)) = path.split_first() else { return Ok(value.unwrap_or(message).to_vec()) };
    let mut out = Vec::with_capacity(message.len() + value.map_or(0, <[u8]>::len));
    for field in Fields::of(message) {
        let field = field?;
        match (field.value, value) {
            _ if field.number != *first => out.extend_from_slice(field.bytes),
            (_, None) if rest.is_empty() => {}
            (Value::Bytes(within), _) => put_bytes(field.number, &edited(within, rest, value)?, &mut out),
            _ => out.extend_from_slice(field.bytes),
        }
    }
    Ok(out)
}

/// The length of a varint in bytes.
pub fn varint_len(number: usize) -> usize {
    (64 - (number as u64 | 1).leading_zeros() as usize).div_ceil(7)
}

/// Writes a varint.
pub fn put_varint(mut number: u64, out: &mut impl BufMut) {
    while number >= 0x80 {
        out.put_u8(number as u8 | 0x80);
        number >>= 7;
    }
    out.put_u8(number as u8);
}

/// Writes the key and the length of a length-delimited field. Its bytes follow.
pub fn put_head(field: u32, len: usize, out: &mut impl BufMut) {
    put_varint(u64::from(field) << 3 | 2, out);
    put_varint(len as u64, out);
}

/// Writes a length-delimited field, even if it is empty: Kubernetes does so for fields that are not
/// pointers.
pub fn put_bytes(field: u32, bytes: &[u8], out: &mut impl BufMut) {
    put_head(field, bytes.len(), out);
    out.put_slice(bytes);
}

/// Writes a varint field.
pub fn put_number(field: u32, number: u64, out: &mut impl BufMut) {
    put_varint(u64::from(field) << 3, out);
    put_varint(number, out);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::encoding;

    use super::*;

    #[test]
    fn replacing_a_field_adjusts_the_surrounding_lengths() {
        let mut inner = Vec::new();
        let mut outer = Vec::new();
        put_bytes(5, b"before", &mut inner);
        put_bytes(6, b"9", &mut inner);
        put_number(7, 300, &mut inner);
        put_bytes(1, &inner, &mut outer);
        put_bytes(2, &[b'x'; 120], &mut outer);
        let long = [b'1'; 200];
        let changed = replaced(&outer, &[1, 6], &long).unwrap();
        let inner = bytes_field(&changed, 1).unwrap().unwrap();
        assert_eq!(bytes_field(inner, 6), Ok(Some(&long[..])));
        assert_eq!(bytes_field(inner, 5), Ok(Some(&b"before"[..])));
        assert_eq!(bytes_field(&changed, 2), Ok(Some(&[b'x'; 120][..])));
        assert_eq!(replaced(&changed, &[1, 6], b"9").unwrap(), outer, "and back");
        assert_eq!(replaced(&outer, &[1, 8], b"none").unwrap(), outer);
    }

    #[test]
    fn truncated_or_unknown_fields_are_an_error_and_end_the_iteration() {
        for (bytes, what) in [
            (&[0x0a, 5, b'a'][..], "cut off"),
            (&[0x08, 0x80], "cut off"),
            (&[0x0a], "cut off"),
            (&[0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1], "a number of more than 64 bits"),
            (&[0x02, 0], "a field without a number"),
            (&[0x0b], "a field of an unknown type"),
        ] {
            assert_eq!(Fields::of(bytes).collect::<Vec<_>>(), [Err(Malformed(what))]);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_bytes_are_fields_or_an_error_and_no_field_is_lost(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let mut taken = 0;
            let mut failed = false;
            for field in Fields::of(&bytes) {
                prop_assert!(!failed, "an error ends the iteration");
                match field {
                    Ok(field) => {
                        prop_assert!(!field.bytes.is_empty());
                        prop_assert_eq!(&bytes[taken..taken + field.bytes.len()], field.bytes);
                        taken += field.bytes.len();
                    }
                    Err(_) => failed = true,
                }
            }
            prop_assert!(failed || taken == bytes.len());
            let _ = replaced(&bytes, &[2, 1, 6], b"7");
        }

        #[test]
        fn fields_written_by_prost_are_read(number in any::<u64>(), text in ".{0,300}", field in 1..100_000u32) {
            let mut bytes = Vec::new();
            encoding::uint64::encode(field, &number, &mut bytes);
            encoding::string::encode(field + 1, &text, &mut bytes);
            encoding::fixed32::encode(field + 2, &7, &mut bytes);
            encoding::double::encode(field + 3, &7.0, &mut bytes);
            let read: Vec<_> = Fields::of(&bytes).map(|read| read.unwrap()).collect();
            prop_assert_eq!(read.iter().map(|read| read.number).collect::<Vec<_>>(), (field..field + 4).collect::<Vec<_>>());
            prop_assert!(matches!(read[0].value, Value::Varint(read, _) if read == number));
            prop_assert_eq!(read[1].value, Value::Bytes(text.as_bytes()));
            prop_assert_eq!((read[2].value, read[3].value), (Value::Fixed, Value::Fixed));
            let mut again = Vec::new();
            put_number(field, number, &mut again);
            put_bytes(field + 1, text.as_bytes(), &mut again);
            prop_assert!(bytes.starts_with(&again));
            prop_assert_eq!(varint_len(text.len()), encoding::encoded_len_varint(text.len() as u64));
        }
    }
}
