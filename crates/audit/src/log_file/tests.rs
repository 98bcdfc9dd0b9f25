use std::time::UNIX_EPOCH;

use super::*;

/// An output that takes this many bytes and then fails.
#[derive(Default)]
struct Disk {
    taken: Vec<u8>,
    room: usize,
    can_cut: bool,
}

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(self.room - self.taken.len());
        self.taken.extend_from_slice(&bytes[..taken]);
        if taken == 0 && !bytes.is_empty() { Err(io::ErrorKind::StorageFull.into()) } else { Ok(taken) }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Output for Disk {
    fn cut(&mut self, bytes: u64) -> io::Result<()> {
        if !self.can_cut {
            return Err(io::ErrorKind::Unsupported.into());
        }
        self.taken.truncate(usize::try_from(bytes).unwrap());
        Ok(())
    }
}

#[test]
fn a_line_that_was_written_in_part_is_cut_off_or_ended() {
    for (can_cut, expected) in [(true, "one\ntwo\n"), (false, "one\ntw\ntwo\n")] {
        let output = Disk { room: 6, can_cut, ..Disk::default() };
        let mut appender = Appender { output, bytes: 0, is_torn: false };
        appender.append(b"one\n").unwrap();
        assert_eq!(appender.append(b"two\n").unwrap_err().kind(), io::ErrorKind::StorageFull);
        appender.output.room = 100;
        appender.append(b"two\n").unwrap();
        assert_eq!(appender.output.taken, expected.as_bytes(), "{can_cut}");
    }
}

fn day(day: u64) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(day * 24 * 3600)
}

#[test]
fn a_part_of_a_line_that_a_killed_process_left_is_ended() {
    let folder = tempfile::tempdir().unwrap();
    for (left, expected) in [("one\ntw", "one\ntw\ntwo\n"), ("one\n", "one\ntwo\n"), ("", "two\n")] {
        let path = folder.path().join("audit.log");
        fs::write(&path, left).unwrap();
        open(&path).unwrap().append(b"two\n").unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), expected);
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn log(folder: &Path, backups_max: Option<usize>, age_max: Option<Duration>) -> LogFile {
    let rotation = Rotation { bytes_max: 10, backups_max, age_max };
    LogFile::open(folder.join("audit.log"), rotation, || day(10)).unwrap()
}

#[test]
fn a_file_is_rotated_before_it_exceeds_its_size_and_continued_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let mut first = log(folder.path(), None, None);
    first.append(b"12345\n").unwrap();
    drop(first);
    let mut second = log(folder.path(), None, None);
    second.append(b"678\n").unwrap();
    assert_eq!(names(folder.path()), ["audit.log"]);
    second.append(b"abc\n").unwrap();
    // Longer than a file: it has one of its own.
    second.append(b"0123456789abcdef\n").unwrap();
    second.append(b"end\n").unwrap();
    assert_eq!(
        names(folder.path()),
        [
            "audit-1970-01-11T00-00-00.000.log",
            "audit-1970-01-11T00-00-00.001.log",
            "audit-1970-01-11T00-00-00.002.log",
            "audit.log"
        ]
    );
    let text = |name: &str| fs::read_to_string(folder.path().join(name)).unwrap();
    assert_eq!(text("audit-1970-01-11T00-00-00.000.log"), "12345\n678\n");
    assert_eq!(text("audit.log"), "end\n");
}

#[test]
fn old_files_are_removed_by_count_and_age_and_others_are_not() {
    let others =
        ["audit-x.log", "audit.log.1", "other-1970-01-02T00-00-00.000.log", "audit-1970-01-02T00-00-00.000.txt"];
    let kept_of = |backups_max, age_max| {
        let folder = tempfile::tempdir().unwrap();
        let backups = (1..=5).map(|day| format!("audit-1970-01-0{day}T00-00-00.000.log"));
        for name in backups.chain(others.map(str::to_owned)) {
            fs::write(folder.path().join(name), "").unwrap();
        }
        let mut log = log(folder.path(), backups_max, age_max);
        log.append(b"0123456789\n").unwrap();
        log.append(b"x\n").unwrap();
        let names = names(folder.path());
        assert!(others.iter().all(|other| names.iter().any(|name| name == other)), "{names:?}");
        names.len() - others.len() - 1
    };
    assert_eq!(kept_of(None, None), 6);
    assert_eq!(kept_of(Some(2), None), 2);
    // Today is the eleventh.
    assert_eq!(kept_of(None, Some(Duration::from_secs(7 * 24 * 3600))), 3);
}

#[test]
fn a_file_that_was_moved_is_opened_again_when_asked() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = log(folder.path(), None, None);
    log.append(b"one\n").unwrap();
    fs::rename(folder.path().join("audit.log"), folder.path().join("moved")).unwrap();
    log.append(b"two\n").unwrap();
    log.reopen_handle().reopen();
    log.append(b"three\n").unwrap();
    assert_eq!(fs::read_to_string(folder.path().join("moved")).unwrap(), "one\ntwo\n");
    assert_eq!(fs::read_to_string(folder.path().join("audit.log")).unwrap(), "three\n");
}

#[test]
fn a_file_that_cannot_be_renamed_is_continued() {
    let folder = tempfile::tempdir().unwrap();
    let mut log = log(folder.path(), None, None);
    log.append(b"0123456789\n").unwrap();
    // Every name that it could get is taken.
    for later in 0..u64::from(NAMES_MAX) {
        let name = time_text(day(10) + Duration::from_millis(later));
        fs::write(folder.path().join(format!("audit-{name}.log")), "").unwrap();
    }
    log.append(b"x\n").unwrap();
    assert_eq!(fs::read_to_string(folder.path().join("audit.log")).unwrap(), "0123456789\nx\n");
}
