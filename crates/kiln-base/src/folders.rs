//! The user's folders, where each operating system keeps them.

use std::env;
use std::path::{Path, PathBuf, is_separator};

/// The user's home folder.
pub fn home() -> Option<PathBuf> {
    env::home_dir().filter(|path| !path.as_os_str().is_empty())
}

/// The folder for data that programs can make again, such as `~/.cache`.
pub fn cache() -> Option<PathBuf> {
    Base { xdg: "XDG_CACHE_HOME", linux: ".cache", macos: "Library/Caches", windows: "LOCALAPPDATA" }.find()
}

/// The folder for what Kiln can make again: `KILN_CACHE_DIR`, or `kiln` in [`cache`].
pub fn kiln_cache() -> Option<PathBuf> {
    from_env("KILN_CACHE_DIR").or_else(|| Some(cache()?.join("kiln")))
}

/// The folder for settings, such as `~/.config`.
pub fn config() -> Option<PathBuf> {
    Base {
        xdg: "XDG_CONFIG_HOME",
        linux: ".config",
        macos: "Library/Application Support",
        windows: "APPDATA",
    }
    .find()
}

/// The folder for a program's own data, such as `~/.local/share`.
pub fn data() -> Option<PathBuf> {
    let macos = "Library/Application Support";
    Base { xdg: "XDG_DATA_HOME", linux: ".local/share", macos, windows: "LOCALAPPDATA" }.find()
}

/// The folder of the user's key and certificates to sign images with: `kiln/credentials` in [`data`].
pub fn credentials() -> Option<PathBuf> {
    Some(data()?.join("kiln").join("credentials"))
}

/// A path from an environment variable; an empty variable counts as unset.
pub fn from_env(name: &str) -> Option<PathBuf> {
    env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// A path as users write it: `~` at its beginning is their home folder.
///
/// ```
/// use std::path::Path;
/// let expand = |text| kiln_base::folders::expand(text, Some(Path::new("/home/ann")));
/// assert_eq!(expand("~/models"), Path::new("/home/ann/models"));
/// assert_eq!(expand("~ann"), Path::new("~ann"));
/// ```
pub fn expand(text: &str, home: Option<&Path>) -> PathBuf {
    let rest = text.strip_prefix('~').filter(|rest| rest.is_empty() || rest.starts_with(is_separator));
    match rest.zip(home) {
        Some((rest, home)) => home.join(rest.trim_start_matches(is_separator)),
        None => text.into(),
    }
}

/// One kind of folder: the variables that name it, and where it lies below the home folder.
struct Base {
    xdg: &'static str,
    linux: &'static str,
    macos: &'static str,
    windows: &'static str,
}

impl Base {
    fn find(self) -> Option<PathBuf> {
        self.resolve(env::consts::OS, &from_env, home())
    }

    fn resolve(
        self,
        os: &str,
        var: &dyn Fn(&str) -> Option<PathBuf>,
        home: Option<PathBuf>,
    ) -> Option<PathBuf> {
        match os {
            "windows" => var(self.windows),
            "macos" => Some(home?.join(self.macos)),
            // The XDG specification says to ignore relative paths.
            _ => var(self.xdg).filter(|path| path.is_absolute()).or_else(|| Some(home?.join(self.linux))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(os: &str, vars: &[(&str, &str)], home: Option<&str>) -> Option<PathBuf> {
        let var = |name: &str| vars.iter().find(|(n, _)| *n == name).map(|(_, value)| PathBuf::from(value));
        let base =
            Base { xdg: "XDG_CACHE_HOME", linux: ".cache", macos: "Library/Caches", windows: "LOCALAPPDATA" };
        base.resolve(os, &var, home.map(PathBuf::from))
    }

    #[test]
    fn each_system_has_its_own_cache_folder() {
        assert_eq!(cache("linux", &[], Some("/h")), Some("/h/.cache".into()));
        assert_eq!(cache("macos", &[], Some("/h")), Some("/h/Library/Caches".into()));
        assert_eq!(cache("windows", &[("LOCALAPPDATA", "C:/l")], Some("/h")), Some("C:/l".into()));
        assert_eq!(cache("linux", &[], None), None);
    }

    /// Without a drive, no path is absolute on Windows.
    #[cfg(unix)]
    #[test]
    fn the_xdg_variable_counts_only_with_an_absolute_path() {
        assert_eq!(cache("linux", &[("XDG_CACHE_HOME", "/x")], Some("/h")), Some("/x".into()));
        assert_eq!(cache("linux", &[("XDG_CACHE_HOME", "x")], Some("/h")), Some("/h/.cache".into()));
        assert_eq!(cache("macos", &[("XDG_CACHE_HOME", "/x")], Some("/h")), Some("/h/Library/Caches".into()));
    }
}
