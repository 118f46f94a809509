//! Paths as Windows has them: names that it reserves, and paths beyond 260 characters.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::io;
use std::path::{Component, Path, PathBuf, Prefix};

/// The longest path that Windows takes in every call. A folder must leave room for a name in it.
const MAX_PATH: usize = 247;

/// Says why Windows can't have a file or folder of this name; `None` if it can.
///
/// Names of devices count with any extension: `aux.png` is the device, not a file. A colon names a second stream of the
/// file before it, and dots and spaces at the end are dropped without a word.
///
/// ```
/// assert!(kiln_base::windows_name_problem("con.png").is_some());
/// assert!(kiln_base::windows_name_problem("concert.png").is_none());
/// ```
pub fn windows_name_problem(name: &str) -> Option<&'static str> {
    if name.ends_with(['.', ' ']) {
        return Some("a name can't end with a dot or a space");
    }
    if name.contains(|c: char| c.is_control() || "<>:\"|?*/\\".contains(c)) {
        return Some("a name can't contain < > : \" | ? * / or \\");
    }
    let stem = name.split('.').next().unwrap_or(name).trim_end().to_ascii_lowercase();
    let numbered = |device: &str| {
        let number = stem.strip_prefix(device);
        number.is_some_and(|n| matches!(n, "¹" | "²" | "³") || n.len() == 1 && "123456789".contains(n))
    };
    let devices = ["con", "prn", "aux", "nul", "conin$", "conout$"];
    (devices.contains(&&*stem) || numbered("com") || numbered("lpt"))
        .then_some("Windows reserves this name for a device")
}

/// Refuses a path with a name that the system would take for something else; only Windows has such names.
pub(crate) fn check_name(path: &Path) -> io::Result<()> {
    let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    match windows_name_problem(&name).filter(|_| cfg!(windows)) {
        Some(problem) => Err(io::Error::new(io::ErrorKind::InvalidFilename, problem)),
        None => Ok(()),
    }
}

/// A long path in the form that every call of Windows takes: `\\?\C:\…`. The standard library does so by itself; SQLite and
/// others get their paths from here. Short paths, and those of other systems, stay as they are.
pub fn long_path(path: &Path) -> Cow<'_, Path> {
    let absolute = || std::path::absolute(path).ok().filter(|path| path.as_os_str().len() > MAX_PATH);
    match cfg!(windows).then(absolute).flatten() {
        Some(absolute) => Cow::Owned(verbatim(absolute)),
        None => Cow::Borrowed(path),
    }
}

/// The full path of a file or folder that exists, with all links followed, in the form that users and other programs know:
/// on Windows without `\\?\` where that means the same.
pub fn canonicalize(path: &Path) -> io::Result<PathBuf> {
    let full = std::fs::canonicalize(path)?;
    Ok(if cfg!(windows) {
        full.to_str().and_then(without_prefix).map_or(full.clone(), PathBuf::from)
    } else {
        full
    })
}

/// A path without `\\?\`; `None` if it has none, or means something else without.
fn without_prefix(path: &str) -> Option<String> {
    let rest = path.strip_prefix(r"\\?\")?;
    let (start, names) = match rest.strip_prefix(r"UNC\") {
        Some(names) => (r"\\", names),
        None => rest.split_at_checked(3).filter(|(drive, _)| drive.ends_with(r":\"))?,
    };
    let is_plain = |name: &str| windows_name_problem(name).is_none();
    let text = format!("{start}{names}");
    (text.len() <= MAX_PATH && names.split_terminator('\\').all(is_plain)).then_some(text)
}

fn verbatim(absolute: PathBuf) -> PathBuf {
    let mut parts = absolute.components();
    let Some(Component::Prefix(prefix)) = parts.next() else { return absolute };
    let mut text = OsString::new();
    match prefix.kind() {
        Prefix::Disk(_) => text.extend([OsStr::new(r"\\?\"), prefix.as_os_str()]),
        Prefix::UNC(server, share) => {
            text.extend([OsStr::new(r"\\?\UNC\"), server, OsStr::new(r"\"), share]);
        }
        _ => return absolute,
    }
    for part in parts.filter(|part| *part != Component::RootDir) {
        text.extend([OsStr::new(r"\"), part.as_os_str()]);
    }
    text.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_devices_and_those_that_windows_changes_have_a_problem() {
        let has_problem = |name: &str| windows_name_problem(name).is_some();
        for name in ["aux.png", "CON", "nul.tar.gz", "com1.png", "LPT9", "COM².png", "con .png", "conin$"] {
            assert!(has_problem(name), "{name}");
        }
        for name in ["a.", "a ", "a:b.png", "C:a", "a/b", "a\\b", "a?", "\u{1}"] {
            assert!(has_problem(name), "{name}");
        }
        for name in
            ["a.png", "auxiliary.png", "com.png", "com10.png", "com0", "a.aux", "console", ".kiln", "雪.png"]
        {
            assert!(!has_problem(name), "{name}");
        }
    }

    #[cfg(windows)]
    #[test]
    fn long_paths_are_verbatim() {
        let long = "x".repeat(250);
        for (given, expected) in [
            (format!(r"C:\a/{long}"), format!(r"\\?\C:\a\{long}")),
            (format!(r"\\server\share\a\..\{long}"), format!(r"\\?\UNC\server\share\{long}")),
            (format!(r"\\?\C:\{long}"), format!(r"\\?\C:\{long}")),
            (r"C:\a".to_owned(), r"C:\a".to_owned()),
        ] {
            assert_eq!(long_path(Path::new(&given)), Path::new(&expected));
        }
    }

    #[test]
    fn full_paths_are_those_that_users_know() {
        for (full, known) in [
            (r"\\?\C:\Users\Jürgen\a.png", r"C:\Users\Jürgen\a.png"),
            (r"\\?\D:\", r"D:\"),
            (r"\\?\UNC\server\share\a.png", r"\\server\share\a.png"),
        ] {
            assert_eq!(without_prefix(full).as_deref(), Some(known));
        }
        let long = format!(r"\\?\C:\{}", "x".repeat(250));
        for other in [r"C:\a", r"\\?\C:\aux.png", r"\\?\C:\a.", r"\\?\Volume{1-2}\a", r"\\?\", &long] {
            assert_eq!(without_prefix(other), None, "{other}");
        }
        let folder = tempfile::tempdir().unwrap();
        let full = canonicalize(&folder.path().join(".")).unwrap();
        assert!(full.is_dir() && !full.to_string_lossy().starts_with(r"\\?\"), "{}", full.display());
    }
}
