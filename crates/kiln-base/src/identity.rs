//! Which file it is and whether it has changed, as the system tells without reading it.

#[cfg(unix)]
use std::fs;
use std::fs::File;
use std::io;
use std::path::Path;
use std::sync::LazyLock;
use std::time::{Duration, SystemTime};

/// The age from which on a change of a file shows in its times: some file systems count in steps of two seconds.
const SETTLED: Duration = Duration::from_secs(3);

/// Identifies the content of a file: device, inode, size and times.
///
/// Files that are open at the same time and have the same identity are the same. Over time this is so only for files that
/// [are settled](FileIdentity::is_settled).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileIdentity {
    text: String,
    changed: Option<SystemTime>,
}

impl FileIdentity {
    /// The identity of an open file; `path` is its name.
    #[cfg(unix)]
    pub fn of(file: &File, _: &Path) -> io::Result<FileIdentity> {
        Ok(FileIdentity::new(&file.metadata()?))
    }

    /// The identity of an open file; `path` is its name.
    #[cfg(windows)]
    pub fn of(file: &File, path: &Path) -> io::Result<FileIdentity> {
        let metadata = file.metadata()?;
        let (size, modified) = (metadata.len(), metadata.modified().ok());
        // Some network drives have no numbers of files.
        let Ok(id) = kiln_windows::FileId::of(file) else {
            let text = format!("{size} {modified:?} {:?} {}", metadata.created().ok(), path.display());
            return Ok(FileIdentity { text, changed: modified });
        };
        let kiln_windows::FileId { volume, file, changed } = id;
        // As in Unix's times of inodes: programs set the time of modification alone.
        const UNIX_EPOCH: i64 = 116_444_736_000_000_000;
        let since = changed.checked_sub(UNIX_EPOCH).and_then(|ticks| u64::try_from(ticks).ok());
        let time = since.and_then(|ticks| {
            let since = Duration::new(ticks / 10_000_000, (ticks % 10_000_000 * 100) as u32);
            SystemTime::UNIX_EPOCH.checked_add(since)
        });
        let latest = modified.zip(time).map(|(a, b)| a.max(b));
        Ok(FileIdentity { text: format!("{volume} {file} {size} {modified:?} {changed}"), changed: latest })
    }

    #[cfg(unix)]
    fn new(metadata: &fs::Metadata) -> FileIdentity {
        use std::os::unix::fs::MetadataExt;
        let (device, inode, size) = (metadata.dev(), metadata.ino(), metadata.size());
        let modified = (metadata.mtime(), metadata.mtime_nsec());
        // The time of the inode's last change, too: unlike the modification time, no program can set it.
        let changed = (metadata.ctime(), metadata.ctime_nsec());
        let time = |(seconds, nanos): (i64, i64)| {
            let since = Duration::new(seconds.try_into().ok()?, nanos.try_into().ok()?);
            SystemTime::UNIX_EPOCH.checked_add(since)
        };
        let latest = time(modified).zip(time(changed)).map(|(a, b)| a.max(b));
        FileIdentity { text: format!("{device} {inode} {size} {modified:?} {changed:?}"), changed: latest }
    }

    /// The identity as a text, for keys.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether any change from now on would change the identity. Of a file that was just changed, another change may have the
    /// same time.
    pub fn is_settled(&self) -> bool {
        self.changed.is_some_and(|time| time.elapsed().is_ok_and(|age| age > SETTLED))
    }
}

/// Whether two paths lead to the same file, also through links.
pub fn is_same_file(a: &Path, b: &Path) -> bool {
    match (place(a), place(b)) {
        (Ok(a), Ok(b)) => a == b,
        // Windows has no numbers of files on FAT and some network drives.
        _ => matches!((std::fs::canonicalize(a), std::fs::canonicalize(b)), (Ok(a), Ok(b)) if a == b),
    }
}

/// The device and the number of a file.
#[cfg(unix)]
fn place(path: &Path) -> io::Result<(u64, u64)> {
    use std::os::unix::fs::MetadataExt;
    let metadata = fs::metadata(path)?;
    Ok((metadata.dev(), metadata.ino()))
}

/// The volume and the number of a file.
#[cfg(windows)]
fn place(path: &Path) -> io::Result<(u64, u128)> {
    let id = kiln_windows::FileId::of(&File::open(path)?)?;
    Ok((id.volume, id.file))
}

/// A text that identifies this build of the program, or of the library that a program has loaded: for keys of results that
/// another build may round differently.
pub fn program_identity() -> &'static str {
    static IDENTITY: LazyLock<String> = LazyLock::new(|| {
        let identity = of_library().or_else(of_program);
        // Unknown: a text that no other process has.
        let unknown = || format!("process {} {:?}", std::process::id(), SystemTime::now());
        identity.unwrap_or_else(unknown)
    });
    &IDENTITY
}

#[cfg(unix)]
fn of_program() -> Option<String> {
    // Linux follows this link even if the program was replaced since it was started.
    let own = Path::new(if cfg!(target_os = "linux") { "/proc/self/exe" } else { "" });
    let metadata = fs::metadata(own).or_else(|_| fs::metadata(std::env::current_exe()?)).ok()?;
    Some(FileIdentity::new(&metadata).text)
}

/// [`of_library`] has it.
#[cfg(windows)]
fn of_program() -> Option<String> {
    None
}

/// The identity of the file that this code was loaded from, which is a library's in C and Python programs.
#[cfg(target_os = "linux")]
fn of_library() -> Option<String> {
    use std::os::unix::fs::MetadataExt;
    let code = of_library as fn() -> Option<String> as usize;
    let maps = fs::read_to_string("/proc/self/maps").ok()?;
    // `start-end rights offset device inode path`
    let found = maps.lines().find_map(|line| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let address = |text| usize::from_str_radix(text, 16).ok();
        let holds = (address(start)?..address(end)?).contains(&code);
        holds.then_some(rest)
    })?;
    let mut fields = found.splitn(5, ' ');
    let inode: u64 = fields.nth(3)?.parse().ok()?;
    let path = Path::new(fields.next()?.trim_start());
    // Not that of a newer file of this name.
    let metadata = fs::metadata(path).ok().filter(|metadata| metadata.ino() == inode)?;
    Some(FileIdentity::new(&metadata).text)
}

/// The identity of the file that this code was loaded from. Windows lets nobody replace it meanwhile.
#[cfg(windows)]
fn of_library() -> Option<String> {
    let path = kiln_windows::own_file().ok()?;
    Some(FileIdentity::of(&File::open(&path).ok()?, &path).ok()?.text)
}

#[cfg(not(any(target_os = "linux", windows)))]
fn of_library() -> Option<String> {
    None
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn identity(path: &Path) -> FileIdentity {
        FileIdentity::of(&File::open(path).unwrap(), path).unwrap()
    }

    #[test]
    fn a_new_file_is_not_settled_even_if_its_modification_time_is_set() {
        let file = tempfile::NamedTempFile::new().unwrap();
        file.as_file().set_modified(SystemTime::now() - Duration::from_secs(1000)).unwrap();
        assert!(!identity(file.path()).is_settled());
        let settled = |changed| FileIdentity { text: String::new(), changed: Some(changed) }.is_settled();
        assert!(settled(SystemTime::now() - 2 * SETTLED) && !settled(SystemTime::now()));
        assert!(!settled(SystemTime::now() + 2 * SETTLED), "the clocks differ");
    }

    #[test]
    fn a_file_of_the_same_size_and_time_under_the_same_name_is_another_one() {
        let folder = tempfile::tempdir().unwrap();
        let (path, new) = (folder.path().join("a"), folder.path().join("new"));
        let time = SystemTime::now() - Duration::from_secs(1000);
        for path in [&path, &new] {
            fs::write(path, "same").unwrap();
            File::options().append(true).open(path).unwrap().set_modified(time).unwrap();
        }
        let before = File::open(&path).unwrap();
        assert_eq!(identity(&path), identity(&path));
        fs::rename(&new, &path).unwrap();
        assert_ne!(FileIdentity::of(&before, &path).unwrap(), identity(&path));
    }

    #[test]
    fn a_file_has_many_paths() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::write(path("a"), "same").unwrap();
        fs::write(path("b"), "same").unwrap();
        fs::hard_link(path("a"), path("hard")).unwrap();
        fs::create_dir(path("c")).unwrap();
        assert!(is_same_file(&path("a"), &path("hard")) && is_same_file(&path("a"), &path("c/../a")));
        assert!(!is_same_file(&path("a"), &path("b")) && !is_same_file(&path("a"), &path("none")));
        #[cfg(windows)]
        assert!(is_same_file(&path("a"), &path("A")));
    }

    #[test]
    fn the_program_is_its_own_file() {
        let program = std::env::current_exe().unwrap();
        assert_eq!(program_identity(), identity(&program).as_str());
        #[cfg(any(target_os = "linux", windows))]
        assert_eq!(of_library().as_deref(), Some(identity(&program).as_str()));
    }
}
