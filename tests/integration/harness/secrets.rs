//! Searches kubefan's output and answers for the secrets of the tests: its logs, its audit log, and
//! the answers of its admin port.
//!
//! The hazard is a parser whose error quotes its input, also as a list of the numbers of its bytes.
//! So a part of a private key counts in every form in which a program prints bytes, and a token by
//! its beginning and by its end.

use std::{
    collections::{BTreeSet, HashSet},
    fs,
    sync::{LazyLock, Mutex},
};

use base64::{Engine, engine::general_purpose::STANDARD};

use super::{
    pki::{Authority, IssuedPem},
    tests,
};

/// The start of a JSON Web Token (`{"alg":` in base64) and of the tests' other tokens, and private
/// keys.
const MARKS: [&str; 3] = ["eyJhbGciOi", "token-of-", "PRIVATE KEY"];
/// The bytes of a key that are compared. Fewer could be in a text by chance.
const PART_BYTES: usize = 12;
/// The end of a token that is compared, in bytes.
const TOKEN_END_BYTES: usize = 16;
/// A shorter token could be a word of a log line.
const TOKEN_BYTES_MIN: usize = 8;
/// The largest file that is searched for secrets, in bytes.
const FILE_BYTES_MAX: u64 = 64 << 10;

/// The secrets of this process's tests.
#[derive(Default)]
struct Secrets {
    /// Parts of keys: of their bytes, of their base64, and of the base64 of their PEM.
    keys: HashSet<[u8; PART_BYTES]>,
    /// The ends of tokens.
    tokens: BTreeSet<String>,
}

static SECRETS: LazyLock<Mutex<Secrets>> = LazyLock::new(Mutex::default);

/// Remembers a private key on P-256 (PKCS #8, as `rcgen` makes it).
pub(crate) fn remember_key(pem: &str) {
    // Before the secret number are the names of algorithms, and after it is the public key.
    const SECRET: std::ops::Range<usize> = 36..68;
    let body: String = pem.lines().filter(|line| !line.starts_with("---")).collect();
    let der = STANDARD.decode(&body).expect("a key is base64");
    assert_eq!(der[SECRET.start - 2..SECRET.start], [4, 32], "an octet string with the secret number");
    // Whole groups of three bytes are four characters.
    let text = &body[SECRET.start / 3 * 4..SECRET.end / 3 * 4];
    let start = pem.find(&text[..PART_BYTES]).expect("the text has no line feed there");
    let end = pem.rfind(&text[text.len() - PART_BYTES..]).expect("nor there") + PART_BYTES;
    let twice = &STANDARD.encode(pem)[start.div_ceil(3) * 4..end / 3 * 4];
    let mut secrets = SECRETS.lock().unwrap();
    for bytes in [&der[SECRET], text.as_bytes(), twice.as_bytes()] {
        secrets.keys.extend(bytes.windows(PART_BYTES).map(|part| <[u8; PART_BYTES]>::try_from(part).unwrap()));
    }
}

/// Remembers a bearer token.
pub(crate) fn remember_token(token: &str) {
    if token.len() >= TOKEN_BYTES_MIN {
        let end = token.get(token.len().saturating_sub(TOKEN_END_BYTES)..).expect("a token is ASCII");
        SECRETS.lock().unwrap().tokens.insert(end.to_owned());
    }
}

/// Remembers the tokens in the files that a command line names: kubeconfigs and token files.
pub(super) fn remember_tokens_of(arguments: impl IntoIterator<Item = impl AsRef<str>>) {
    let mut is_token_file = false;
    for argument in arguments {
        let (flag, value) = argument.as_ref().split_once('=').unwrap_or(("", argument.as_ref()));
        let is_token = is_token_file || flag.ends_with("token-file");
        is_token_file = argument.as_ref().ends_with("token-file");
        let is_small = fs::metadata(value).is_ok_and(|file| file.is_file() && file.len() <= FILE_BYTES_MAX);
        let Some(text) = is_small.then(|| fs::read_to_string(value).ok()).flatten() else { continue };
        if is_token {
            remember_token(text.trim());
        }
        for (_, rest) in text.match_indices("token: ").map(|(at, found)| text.split_at(at + found.len())) {
            let end = rest.find([' ', ',', '}', '\n']).unwrap_or(rest.len());
            remember_token(rest[..end].trim_matches(['"', '\'']));
        }
        for (_, rest) in text.match_indices("tokenFile: ").map(|(at, found)| text.split_at(at + found.len())) {
            let end = rest.find([' ', ',', '}', '\n']).unwrap_or(rest.len());
            remember_token(fs::read_to_string(&rest[..end]).unwrap_or_default().trim());
        }
    }
}

/// Fails the test if a text of kubefan has a secret. While a test fails already, it says nothing.
pub(crate) fn assert_none_in(what: &str, text: &str) {
    let secret = secret_in(text);
    assert!(secret.is_none() || std::thread::panicking(), "{secret:?} is in {what}:\n{text}");
}

/// A secret in a text.
fn secret_in(text: &str) -> Option<String> {
    let secrets = SECRETS.lock().unwrap();
    let listed = listed_bytes(text);
    let hex = hex_bytes(text);
    // Metrics are long and polled, and base64 is a small part of them.
    let is_base64 = |c: &u8| c.is_ascii_alphanumeric() || matches!(c, b'+' | b'/');
    let words = text.as_bytes().split(|c| !is_base64(c)).chain([&*listed, &*hex]);
    if let Some(part) = words.flat_map(|word| word.windows(PART_BYTES)).find(|part| secrets.keys.contains(*part)) {
        return Some(format!("a part of a private key, {part:?}"));
    }
    let forms = [text.into(), String::from_utf8_lossy(&listed), String::from_utf8_lossy(&hex)];
    let marks = || MARKS.into_iter().chain(secrets.tokens.iter().map(String::as_str));
    forms.iter().find_map(|form| marks().find(|mark| form.contains(mark))).map(str::to_owned)
}

/// The bytes in lists of numbers, as `Debug` prints them.
fn listed_bytes(text: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    let is_separator = |c: char| matches!(c, ',' | ' ' | '\n' | '[' | ']');
    for word in text.split(is_separator).filter(|word| !word.is_empty()) {
        // Other words stand between two lists.
        bytes.push(word.parse().unwrap_or(0));
    }
    bytes
}

/// The bytes that are written in hexadecimal.
fn hex_bytes(text: &str) -> Vec<u8> {
    let words = text.split(|c: char| !c.is_ascii_hexdigit()).filter(|word| word.len() >= 2 * PART_BYTES);
    let digit = |c: u8| char::from(c).to_digit(16).unwrap_or(0) as u8;
    words.flat_map(|word| word.as_bytes().chunks_exact(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1]))).collect()
}

tests! {
    local: a_part_of_a_key_is_found_in_every_form_and_what_is_public_is_not, the_tokens_of_a_command_line_are_found;
}

async fn a_part_of_a_key_is_found_in_every_form_and_what_is_public_is_not() {
    let IssuedPem { certificate, key } = Authority::new().server();
    let body: String = key.lines().filter(|line| !line.starts_with("---")).collect();
    let der = STANDARD.decode(&body).unwrap();
    let hex: String = der.iter().map(|byte| format!("{byte:02x}")).collect();
    let without_mark = key.replace("PRIVATE", "");
    let forms = [
        without_mark.clone(),
        without_mark.replace('\n', "\\n"),
        body[50..70].to_owned(),
        format!("{:?}", without_mark.as_bytes()),
        format!("{:#?}", der),
        format!("Base64Decode({:?})", &der[40..60]),
        hex,
        STANDARD.encode(&key),
        format!("{:?}", STANDARD.encode(&key).as_bytes()),
    ];
    for form in forms {
        assert!(secret_in(&form).is_some_and(|found| found.contains("a part of a private key")), "{form}");
    }
    assert_eq!(secret_in(&format!("{:?}", key.as_bytes())[..250]).as_deref(), Some("PRIVATE KEY"));
    let public = [certificate.clone(), format!("{:?}", certificate.as_bytes()), STANDARD.encode(&certificate)];
    for text in public.iter().map(String::as_str).chain([&body[..44], &body[96..], "1, 2, 3", ""]) {
        assert_eq!(secret_in(text), None, "{text}");
    }
}

async fn the_tokens_of_a_command_line_are_found() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    fs::write(path("token"), "of-a-file-48151623\n").unwrap();
    fs::write(path("other"), "of-a-kubeconfig-file-4815\n").unwrap();
    fs::write(path("kubeconfig"), "users: [{ name: a, user: { token: in-a-kubeconfig-42 } }]\n").unwrap();
    fs::write(path("second"), format!("user:\n  tokenFile: {}\n", path("other"))).unwrap();
    let by_flag = format!("--upstream-token-file={}", path("token"));
    remember_tokens_of([by_flag, path("kubeconfig"), path("second"), path("absent"), "--resource=pods".to_owned()]);
    for token in ["of-a-file-48151623", "of-a-kubeconfig-file-4815", "in-a-kubeconfig-42"] {
        assert!(secret_in(&format!("error: `{token}` is not a header")).is_some(), "{token}");
    }
}
