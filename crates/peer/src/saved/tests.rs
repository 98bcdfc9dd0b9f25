//! A file that is read equals the one that was saved, and every other file is refused.

use std::{
    fs::{self, Permissions},
    io::{self, Write},
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    time::{Duration, SystemTime},
};

use kubefan_cache::{CacheWriter, HistoryCopy};
use kubefan_common::proto::v1alpha1::TransferResponse;
use kubefan_model::{GroupVersionResource, Scope};
use rand::{RngExt, SeedableRng, rngs::StdRng};
use rustix::fs::stat;
use tempfile::TempDir;
use tokio::time::Instant;

use super::{
    state_dir::check_rights,
    state_file::{self, FORMAT, StateParts, StateReader},
    *,
};
use crate::{
    CacheIdentity, Decoder, Encoder, PeerError, ReceivedCache,
    tests::{Cache, Step, cache, contents, identity, limits, parser, parts, restored},
};

fn head() -> StateHead {
    let endpoint = Endpoint {
        apiserver: "https://10.0.0.1:443".to_owned(),
        ca: vec!["ab".to_owned()],
        source: "https://10.0.0.1:443".to_owned(),
    };
    StateHead {
        endpoint,
        cluster_uid: Some("1".to_owned()),
        name: "pods".to_owned(),
        kind: "Pod".to_owned(),
        list_kind: "PodList".to_owned(),
        namespaced: true,
        selectable_fields: Vec::new(),
        server_version: "v1.35.4".to_owned(),
        schema_hash: "A".to_owned(),
        saved_at_millis: 20_000,
        proven_at_millis: Some(10_000),
    }
}

fn some_parts() -> Vec<TransferResponse> {
    let put = |name: u8| Step::Put { name, label: 1, filler: 0 };
    let now = Instant::now();
    parts(&cache(&[put(1), put(2), Step::Delete { name: 1 }], 10, false, now), 10, 400, now)
}

fn ok(parts: Vec<TransferResponse>) -> impl Iterator<Item = Result<TransferResponse, PeerError>> {
    parts.into_iter().map(Ok)
}

fn key(byte: u8) -> StateKey {
    use base64::{Engine, prelude::BASE64_STANDARD};
    let dir = TempDir::new().unwrap();
    let path = dir.path().join("key");
    fs::write(&path, BASE64_STANDARD.encode([byte; 32])).unwrap();
    StateKey::read(&path).unwrap()
}

fn file(key: Option<&StateKey>) -> Vec<u8> {
    let mut file = Vec::new();
    let content = StateParts { head: &head(), parts: ok(some_parts()), key, salt: [3; 16] };
    let bytes = state_file::write(&mut file, content).unwrap();
    assert_eq!(bytes, file.len() as u64);
    file
}

fn decoded(file: &[u8], key: Option<&StateKey>, wanted: CacheIdentity) -> Result<ReceivedCache, SavedError> {
    let (found, mut reader) = StateReader::open(file, key)?;
    assert_eq!(found, head());
    let mut decoder = Decoder::new(wanted, limits(10), parser(), CacheWriter::new(false), 1 << 20, Instant::now());
    while let Some(part) = reader.next_part()? {
        decoder.take(part)?;
    }
    Ok(decoder.finish()?)
}

fn refusal(file: &[u8], key: Option<&StateKey>) -> Option<String> {
    decoded(file, key, identity()).err().map(|error| error.to_string())
}

#[tokio::test(start_paused = true)]
async fn a_file_has_state_and_history_with_and_without_a_key() {
    for key in [None, Some(key(1))] {
        let file = file(key.as_ref());
        let (store, history, _) = restored(decoded(&file, key.as_ref(), identity()).unwrap());
        let put = |name: u8| Step::Put { name, label: 1, filler: 0 };
        let saved = cache(&[put(1), put(2), Step::Delete { name: 1 }], 10, false, Instant::now());
        assert_eq!(contents(&store, &history), contents(&saved.store, &saved.history));
        assert_eq!(file.windows(6).any(|part| part == b"PodLis"), key.is_none(), "a key hides the head, too");
    }
}

#[tokio::test(start_paused = true)]
async fn a_file_that_is_torn_anywhere_is_refused() {
    for key in [None, Some(key(1))] {
        let file = file(key.as_ref());
        for length in 0..file.len() {
            assert!(refusal(&file[..length], key.as_ref()).is_some(), "torn after {length} bytes");
        }
        let mut longer = file.clone();
        longer.push(0);
        assert!(refusal(&longer, key.as_ref()).is_some(), "something follows");
    }
}

#[tokio::test(start_paused = true)]
async fn a_file_with_another_byte_anywhere_is_refused() {
    for key in [None, Some(key(1))] {
        let file = file(key.as_ref());
        for at in 0..file.len() {
            let mut altered = file.clone();
            altered[at] ^= 0x10;
            assert!(refusal(&altered, key.as_ref()).is_some(), "another byte at {at}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_file_of_another_format_key_or_cluster_is_refused() {
    let plain = file(None);
    let mut next_format = plain.clone();
    next_format[8] = FORMAT as u8 + 1;
    assert!(refusal(&next_format, None).unwrap().contains("the format 2"));
    assert_eq!(refusal(b"kubeconfig", None).unwrap(), "it is not a file of kubefan");
    let encrypted = file(Some(&key(1)));
    assert!(refusal(&encrypted, None).unwrap().contains("no --state-key-file"));
    assert!(refusal(&encrypted, Some(&key(2))).unwrap().contains("does not open it"));
    assert!(refusal(&plain, Some(&key(1))).unwrap().contains("not encrypted"));
    let other = CacheIdentity { cluster: "kube-system uid 2".to_owned(), ..identity() };
    let error = decoded(&plain, None, other).err().unwrap();
    assert!(matches!(error, SavedError::OtherCache { what: "the cluster", .. }), "{error}");
}

#[test]
fn a_time_in_the_future_is_no_age() {
    let at = |seconds: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
    let head = head();
    assert_eq!(head.age(at(70)), Some(Duration::from_secs(60)));
    assert_eq!(head.elapsed(at(70)), Some(Duration::from_secs(50)));
    assert_eq!((head.age(at(15)), head.elapsed(at(15))), (Some(Duration::from_secs(5)), None));
    assert_eq!(head.age(at(9)), None);
    assert_eq!(StateHead { proven_at_millis: None, ..head }.age(at(70)), None, "never proved");
}

fn name() -> StateName {
    StateName::of(&GroupVersionResource::new("apps", "v1", "deployments"), &Scope::Cluster).unwrap()
}

fn dir(parent: &Path) -> StateDir {
    StateDir::open(parent, None, || [5; 16]).unwrap()
}

fn files(parent: &TempDir) -> Vec<String> {
    let mut names: Vec<_> = fs::read_dir(parent.path().join("kubefan"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

/// Disk that is full after some bytes.
struct FullDisk(usize);

impl Write for FullDisk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = self.0.min(bytes.len());
        self.0 -= room;
        if room == 0 { Err(io::ErrorKind::StorageFull.into()) } else { Ok(room) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_is_an_error_and_a_failed_save_leaves_the_file_before() {
    let full = file(None).len();
    let parts = some_parts();
    for room in 0..full {
        let head = head();
        let content = StateParts { head: &head, parts: ok(parts.clone()), key: None, salt: [0; 16] };
        let written = state_file::write(FullDisk(room), content);
        assert!(matches!(written, Err(SavedError::Io(_))), "after {room} bytes");
    }
    let parent = TempDir::new().unwrap();
    let dir = dir(parent.path());
    dir.save(&name(), &head(), ok(some_parts())).unwrap();
    let fails = ok(some_parts()).take(2).chain([Err(PeerError::broken("the encoder has failed"))]);
    let other = StateHead { name: "other".to_owned(), ..head() };
    let SaveFailure { bytes, .. } = dir.save(&name(), &other, fails).unwrap_err();
    assert!(bytes > 0, "they count for the limit of bytes");
    let (found, _) = dir.read(&name()).unwrap();
    assert_eq!(found, head());
    assert_eq!(files(&parent), [name().as_str()], "nothing unfinished is left");
}

#[tokio::test(start_paused = true)]
async fn a_save_replaces_the_file_and_the_rest_of_a_killed_process() {
    let parent = TempDir::new().unwrap();
    let dir = dir(parent.path());
    assert!(matches!(dir.read(&name()), Err(SavedError::Absent)));
    fs::write(dir.path().join(format!("{}.tmp", name().as_str())), "a half").unwrap();
    for at in [1, 2] {
        let head = StateHead { saved_at_millis: at, ..head() };
        let bytes = dir.save(&name(), &head, ok(some_parts())).unwrap();
        assert_eq!(dir.read(&name()).unwrap().0, head);
        let found = fs::metadata(dir.path().join(name().as_str())).unwrap();
        assert_eq!((found.len(), found.permissions().mode() & 0o777), (bytes, 0o600));
    }
    assert_eq!(dir.names().unwrap(), [name()]);
    assert_eq!(files(&parent), [name().as_str()]);
    dir.remove(&name()).unwrap();
    assert!(dir.names().unwrap().is_empty());
    dir.remove(&name()).unwrap();
}

#[tokio::test(start_paused = true)]
async fn only_wanted_files_are_kept() {
    let parent = TempDir::new().unwrap();
    let dir = dir(parent.path());
    let other = StateName::of(&GroupVersionResource::new("", "v1", "pods"), &Scope::Cluster).unwrap();
    for name in [&name(), &other] {
        dir.save(name, &head(), ok(some_parts())).unwrap();
    }
    for foreign in ["nodes_v1__.state.tmp", "readme", "x.tmp"] {
        fs::write(dir.path().join(foreign), "").unwrap();
    }
    assert_eq!(dir.keep_only(|found| *found == name()).unwrap(), 2);
    assert_eq!(files(&parent), [name().as_str(), "readme", "x.tmp"], "foreign files stay");
}

#[tokio::test(start_paused = true)]
async fn a_state_that_a_start_would_refuse_as_too_large_is_not_saved() {
    let put = |name: u8| Step::Put { name, label: 1, filler: 0 };
    let cache = cache(&[put(1), put(2)], 10, false, Instant::now());
    let encoded = |bytes_max: u64| {
        let history = HistoryCopy::of(cache.version);
        let encoder = Encoder::new(&identity(), cache.store.clone(), history, Instant::now());
        encoder.limited_to(bytes_max).collect::<Result<Vec<_>, _>>()
    };
    assert!(encoded(1 << 20).is_ok());
    assert!(matches!(encoded(10), Err(PeerError::TooLarge(10))));
}

#[tokio::test(start_paused = true)]
async fn two_processes_do_not_write_to_one_directory() {
    let parent = TempDir::new().unwrap();
    let first = dir(parent.path());
    let second = dir(parent.path());
    first.save(&name(), &head(), ok(some_parts())).unwrap();
    assert!(second.read(&name()).is_ok());
    let refused = second.save(&name(), &head(), ok(some_parts()));
    assert!(matches!(refused, Err(SaveFailure { bytes: 0, error: SavedError::InUse })));
    assert!(matches!(second.keep_only(|_| false), Err(SavedError::InUse)));
    drop(first);
    second.save(&name(), &head(), ok(some_parts())).unwrap();
}

#[tokio::test(start_paused = true)]
async fn files_that_others_may_write_are_refused() {
    let parent = TempDir::new().unwrap();
    let dir = dir(parent.path());
    dir.save(&name(), &head(), ok(some_parts())).unwrap();
    let file = dir.path().join(name().as_str());
    for mode in [0o620, 0o602, 0o666] {
        fs::set_permissions(&file, Permissions::from_mode(mode)).unwrap();
        assert!(matches!(dir.read(&name()), Err(SavedError::WritableByOthers { mode: found }) if found == mode));
    }
    fs::set_permissions(&file, Permissions::from_mode(0o644)).unwrap();
    assert!(dir.read(&name()).is_ok(), "others may read it if the operator says so");
    for mode in [0o770, 0o707] {
        fs::set_permissions(dir.path(), Permissions::from_mode(mode)).unwrap();
        let refused = StateDir::open(parent.path(), None, || [0; 16]);
        assert!(matches!(refused, Err(SavedError::WritableByOthers { mode: found }) if found == mode));
    }
}

#[test]
fn files_of_other_users_are_refused() {
    let parent = TempDir::new().unwrap();
    let mut found = stat(parent.path()).unwrap();
    let ours = found.st_uid;
    assert!(check_rights(&found, ours).is_ok());
    found.st_uid = ours + 1;
    let refused = check_rights(&found, ours);
    assert!(matches!(refused, Err(SavedError::OtherOwner { owner, .. }) if owner == ours + 1));
}

#[tokio::test(start_paused = true)]
async fn links_and_directories_are_refused() {
    let parent = TempDir::new().unwrap();
    let dir = dir(parent.path());
    dir.save(&name(), &head(), ok(some_parts())).unwrap();
    let link = StateName::of(&GroupVersionResource::new("", "v1", "pods"), &Scope::Cluster).unwrap();
    symlink(dir.path().join(name().as_str()), dir.path().join(link.as_str())).unwrap();
    assert!(matches!(dir.read(&link), Err(SavedError::NotAFile)));
    fs::remove_file(dir.path().join(link.as_str())).unwrap();
    fs::create_dir(dir.path().join(link.as_str())).unwrap();
    assert!(matches!(dir.read(&link), Err(SavedError::NotAFile)));
    let linked = TempDir::new().unwrap();
    symlink(dir.path(), linked.path().join("kubefan")).unwrap();
    assert!(StateDir::open(linked.path(), None, || [0; 16]).is_err());
}

#[tokio::test(start_paused = true)]
async fn a_directory_that_cannot_be_written_is_still_read() {
    assert!(StateDir::open(Path::new("/proc"), None, || [0; 16]).is_err(), "nothing can be created there");
    assert!(StateDir::open(Path::new("/dev/null"), None, || [0; 16]).is_err());
    let parent = TempDir::new().unwrap();
    dir(parent.path()).save(&name(), &head(), ok(some_parts())).unwrap();
    fs::set_permissions(parent.path().join("kubefan"), Permissions::from_mode(0o500)).unwrap();
    fs::set_permissions(parent.path(), Permissions::from_mode(0o500)).unwrap();
    let read_only = dir(parent.path());
    assert!(read_only.read(&name()).is_ok());
    // The rights do not concern root.
    if !rustix::process::geteuid().is_root() {
        assert!(read_only.save(&name(), &head(), ok(some_parts())).is_err());
    }
    assert!(read_only.read(&name()).is_ok());
    fs::set_permissions(parent.path(), Permissions::from_mode(0o700)).unwrap();
}

#[test]
fn a_name_is_of_one_cache() {
    let of = |group: &str, version: &str, resource: &str, scope: Scope| {
        StateName::of(&GroupVersionResource::new(group, version, resource), &scope).map(|name| name.as_str().to_owned())
    };
    let all = of("", "v1", "pods", Scope::Cluster).unwrap();
    let one = of("", "v1", "pods", Scope::Namespace("a".to_owned())).unwrap();
    let group = of("a", "v1", "pods", Scope::Cluster).unwrap();
    assert_eq!([all.as_str(), &one, &group], ["pods_v1__.state", "pods_v1__a.state", "pods_v1_a_.state"]);
    for wrong in ["", "../x", ".x", "a/b", "A", "x\0", "a_b"] {
        assert!(of("", "v1", wrong, Scope::Cluster).is_err(), "{wrong:?}");
    }
}

/// The parts of a cache with some pods, whose contents depend on `seed`.
fn parts_of(seed: u8) -> Vec<TransferResponse> {
    let now = Instant::now();
    parts(&seeded_cache(seed, now), 10, 400, now)
}

fn seeded_cache(seed: u8, now: Instant) -> Cache {
    let put = |name: u8| Step::Put { name, label: seed, filler: 0 };
    cache(&[put(1), put(seed), Step::Delete { name: 1 }, put(seed.wrapping_add(1))], 10, false, now)
}

/// Damages a file as disks and crashes do: ends it early, flips bits, clears or repeats a range, or
/// continues with another file of the same cache.
fn damage(file: &[u8], other: &[u8], random: &mut StdRng) -> Vec<u8> {
    let mut damaged = file.to_vec();
    for _ in 0..random.random_range(1..4) {
        if damaged.is_empty() {
            break;
        }
        let start = random.random_range(0..damaged.len());
        let end = random.random_range(start..damaged.len()) + 1;
        match random.random_range(0..6) {
            0 => damaged.truncate(start),
            1 => damaged[start] ^= 1 << random.random_range(0..8),
            2 => damaged[start..end].fill(0),
            3 => damaged[start..end].fill_with(|| random.random()),
            4 => damaged.extend_from_within(start..end),
            _ => {
                damaged.truncate(start);
                damaged.extend_from_slice(&other[start.min(other.len())..]);
            }
        }
    }
    damaged
}

#[tokio::test(start_paused = true)]
async fn no_random_damage_gives_another_state() {
    for key in [None, Some(key(1))] {
        let content = |seed: u8, salt: u8| {
            let mut file = Vec::new();
            let head = head();
            let content = StateParts { head: &head, parts: ok(parts_of(seed)), key: key.as_ref(), salt: [salt; 16] };
            state_file::write(&mut file, content).unwrap();
            file
        };
        let (file, other) = (content(2, 3), content(7, 4));
        for seed in 0..1_000 {
            let damaged = damage(&file, &other, &mut StdRng::seed_from_u64(seed));
            // The damage may undo itself, or leave one of the two whole.
            let is_whole = damaged == file || damaged == other;
            assert_eq!(refusal(&damaged, key.as_ref()).is_none(), is_whole, "seed {seed}");
        }
    }
}

/// The reader's result from a directory: the seed of the state's content, if there is one.
fn restored_seed(dir: &StateDir) -> Result<u8, SavedError> {
    let now = Instant::now();
    let decoder = |_: &StateHead, theirs: &CacheIdentity| {
        identity().agrees_with(theirs)?;
        Ok(Decoder::new(identity(), limits(10), parser(), CacheWriter::new(false), 1 << 20, now))
    };
    let RestoredState { head, received, .. } = dir.restore(&name(), decoder)?;
    let (store, history, _) = restored(received);
    let seed = u8::try_from(head.saved_at_millis).unwrap();
    let saved = seeded_cache(seed, now);
    assert_eq!(contents(&store, &history), contents(&saved.store, &saved.history), "the content of the file {seed}");
    Ok(seed)
}

#[tokio::test(start_paused = true)]
async fn after_a_crash_at_any_moment_of_a_save_there_is_one_whole_state_or_none() {
    let saved = |dir: &StateDir, seed: u8| {
        let head = StateHead { saved_at_millis: seed.into(), ..head() };
        dir.save(&name(), &head, ok(parts_of(seed))).unwrap();
    };
    for seed in 0..300 {
        let mut random = StdRng::seed_from_u64(seed);
        let (before, after) = (random.random_range(2..100), random.random_range(100..200));
        let parent = TempDir::new().unwrap();
        let killed = dir(parent.path());
        let file = killed.path().join(name().as_str());
        let unfinished = killed.path().join(format!("{}.tmp", name().as_str()));
        saved(&killed, after);
        let content = fs::read(&file).unwrap();
        let has_before = random.random_range(0..4) > 0;
        if has_before {
            saved(&killed, before);
        } else {
            killed.remove(&name()).unwrap();
        }
        // The disk has a part of the new file. The rest is missing, or was never written.
        let mut on_disk = content[..random.random_range(0..=content.len())].to_vec();
        if random.random_range(0..3) == 0 {
            on_disk.resize(content.len(), 0);
        }
        fs::write(&unfinished, &on_disk).unwrap();
        // Only a disk that does not flush has the new name before the content.
        let is_renamed = random.random_range(0..2) == 0;
        if is_renamed {
            fs::set_permissions(&unfinished, Permissions::from_mode(0o600)).unwrap();
            fs::rename(&unfinished, &file).unwrap();
        }
        drop(killed);

        let next = dir(parent.path());
        let found = restored_seed(&next).ok();
        let expected =
            if is_renamed { Some(after).filter(|_| on_disk == content) } else { Some(before).filter(|_| has_before) };
        assert_eq!(found, expected, "seed {seed}");
        assert!(next.keep_only(|_| true).unwrap() <= 1, "the rest of the killed process is removed");
        assert!(!unfinished.exists());
        saved(&next, 1);
        assert_eq!(restored_seed(&next).unwrap(), 1, "the next save succeeds");
    }
}
