//! One Kubernetes object: immutable, shared, and parsed only as far as routing needs.
//!
//! The problem: a cache holds many objects and reads only a few values of each (key, version, uid,
//! labels, selectable fields), but must send every object byte for byte as the apiserver would. So
//! an object is its bytes plus the spans of those values. The obvious alternative, a decoded
//! object, costs about five times the memory of its JSON and would have to be encoded again.
//!
//! The bytes are always in the form that a watch sends. List items of built-in types lack `kind`
//! and `apiVersion`; [`ObjectParser::from_list_item`] adds them where the apiserver's encoder
//! writes them, so lists and watches give the same bytes. In protobuf the bytes are the whole
//! envelope. In a Table they are the row, which contains the object.
//!
//! A packed object is a second `Object` whose bytes are compressed and whose uid, labels and fields
//! lie uncompressed in front. An object never changes, so reading one takes no lock.

mod attributes;
mod cached_object;
mod json;
mod json_fields;
mod label_lookup;
mod object_error;
mod parse;
mod parser;
mod protobuf_fields;
mod protobuf_metadata;
mod texts;

pub use self::{cached_object::Object, label_lookup::LabelLookup, object_error::ObjectError, parser::ObjectParser};

#[cfg(test)]
mod tests;
