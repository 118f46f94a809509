//! How the program came onto this machine, which decides how it is updated and removed.

use std::path::{Component, Path, PathBuf};

/// The lists of files that the installers write, below a folder some levels above the program. A line is a path below that
/// folder, too.
const LISTS: [(usize, &str); 2] = [(1, "installed.txt"), (2, "share/doc/kiln/installed.txt")];

/// Where a program came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    Cargo,
    Homebrew,
    Scoop,
    Winget,
    Nix,
    /// The Python package; the running program is Python.
    Pip,
    Apt,
    Dnf,
    Pacman,
    Apk,
    /// A file that was copied to its place, by an installer or by hand.
    File,
}

/// The running program and its origin.
pub fn of_program() -> Option<(PathBuf, Origin)> {
    let program = std::env::current_exe().ok()?;
    // A package manager's link leads to its own folder.
    let program = kiln_base::canonicalize(&program).unwrap_or(program);
    let origin = Origin::of(&program, &|path| Path::new(path).exists());
    Some((program, origin))
}

impl Origin {
    /// Tells the origin by the program's path. `exists`: whether there is such a file of a package manager.
    fn of(program: &Path, exists: &dyn Fn(&str) -> bool) -> Origin {
        // By hand: another system's separators are none for `Path`.
        let text = program.to_string_lossy().replace('\\', "/").to_lowercase();
        let name = text.rsplit('/').next().unwrap_or_default();
        let has = |folder: &str| text.contains(folder);
        match () {
            () if name.starts_with("python") => Origin::Pip,
            () if has("/.cargo/bin/") => Origin::Cargo,
            () if has("/cellar/") => Origin::Homebrew,
            () if has("/scoop/") => Origin::Scoop,
            () if has("/winget/packages/") => Origin::Winget,
            () if has("/nix/store/") => Origin::Nix,
            () if text.starts_with("/usr/bin/") && exists("/var/lib/dpkg/info/kiln.list") => Origin::Apt,
            () if text.starts_with("/usr/bin/") && exists("/var/lib/pacman/local") => Origin::Pacman,
            () if text.starts_with("/usr/bin/") && exists("/lib/apk/db/installed") => Origin::Apk,
            () if text.starts_with("/usr/bin/") && exists("/usr/bin/rpm") => Origin::Dnf,
            () => Origin::File,
        }
    }

    /// How to get a newer release, from the address of all.
    pub fn update(self, releases: &str) -> String {
        match self {
            Origin::Cargo => "`cargo install --locked --path crates/kiln` in a newer clone".into(),
            Origin::Homebrew => "`brew upgrade kiln`".into(),
            Origin::Scoop => "`scoop update kiln`".into(),
            Origin::Winget => "`winget upgrade kiln`".into(),
            Origin::Nix => "`nix profile upgrade kiln`".into(),
            Origin::Pip => "`pip install --upgrade kiln`".into(),
            Origin::Apt => "`sudo apt install FILE` with the .deb of the release".into(),
            Origin::Dnf => "`sudo dnf install FILE` with the .rpm of the release".into(),
            Origin::Pacman => "build the newer package, and `sudo pacman -U` it".into(),
            Origin::Apk => "`sudo apk upgrade kiln`".into(),
            Origin::File if cfg!(windows) => {
                format!("`irm {releases}/latest/download/install.ps1 | iex`")
            }
            Origin::File => format!("`curl -fsSL {releases}/latest/download/install.sh | sh`"),
        }
    }

    /// The command that removes the program, which these files are.
    pub fn remove(self, files: &[PathBuf]) -> String {
        match self {
            Origin::Cargo => "cargo uninstall kiln".into(),
            Origin::Homebrew => "brew uninstall kiln".into(),
            Origin::Scoop => "scoop uninstall kiln".into(),
            Origin::Winget => "winget uninstall kiln".into(),
            Origin::Nix => "nix profile remove kiln".into(),
            Origin::Pip => "pip uninstall kiln".into(),
            Origin::Apt => "sudo apt remove kiln".into(),
            Origin::Dnf => "sudo dnf remove kiln".into(),
            Origin::Pacman => "sudo pacman -R kiln-bin".into(),
            Origin::Apk => "sudo apk del kiln".into(),
            Origin::File => delete_command(files),
        }
    }
}

/// The files that an installer wrote: those of its list and the list itself, if that has the program.
pub fn files_of(program: &Path) -> Vec<PathBuf> {
    let mut lists = LISTS.into_iter().filter_map(|(levels, list)| {
        let folder = program.ancestors().nth(levels)?;
        let text = kiln_base::read_regular_text(&folder.join(list)).ok()?;
        let names = text
            .lines()
            .map(|line| Path::new(line.trim()))
            .filter(|name| is_below(name))
            .chain([Path::new(list)]);
        Some(names.map(|name| folder.join(name)).filter(|file| file.is_file()).collect::<Vec<_>>())
    });
    lists.find(|files| files.iter().any(|file| file == program)).unwrap_or_else(|| vec![program.into()])
}

/// Whether a path stays below the folder that it begins in.
fn is_below(path: &Path) -> bool {
    path.components().all(|part| matches!(part, Component::Normal(_)))
}

/// The command that deletes files or folders, for this system's shell.
pub fn delete_command(paths: &[PathBuf]) -> String {
    let recurse = paths.iter().any(|path| path.is_dir());
    let paths = paths.iter().map(|path| path.display().to_string());
    if cfg!(windows) {
        let paths: Vec<String> = paths.map(|path| quoted_for_powershell(&path)).collect();
        format!("Remove-Item {}-LiteralPath {}", if recurse { "-Recurse " } else { "" }, paths.join(", "))
    } else {
        let paths: Vec<String> = paths.map(|path| quoted_for_sh(&path)).collect();
        format!("rm {}{}", if recurse { "-r " } else { "" }, paths.join(" "))
    }
}

fn quoted_for_sh(text: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-".contains(c);
    if text.chars().all(plain) && !text.starts_with('-') {
        return text.to_owned();
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

fn quoted_for_powershell(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_path_of_a_program_tells_what_installed_it() {
        let none = |_: &str| false;
        for (path, origin) in [
            ("/home/me/.cargo/bin/kiln", Origin::Cargo),
            (r"C:\Users\me\.cargo\bin\kiln.exe", Origin::Cargo),
            ("/opt/homebrew/Cellar/kiln/0.1.0/bin/kiln", Origin::Homebrew),
            (r"C:\Users\me\scoop\apps\kiln\current\kiln.exe", Origin::Scoop),
            (r"C:\Users\me\AppData\Local\Microsoft\WinGet\Packages\kiln\kiln.exe", Origin::Winget),
            ("/nix/store/abc-kiln-0.1.0/bin/kiln", Origin::Nix),
            ("/usr/bin/python3.12", Origin::Pip),
            ("/usr/bin/kiln", Origin::File),
            ("/home/me/.local/bin/kiln", Origin::File),
        ] {
            assert_eq!(Origin::of(Path::new(path), &none), origin, "{path}");
        }
        for (file, origin) in [
            ("/var/lib/dpkg/info/kiln.list", Origin::Apt),
            ("/usr/bin/rpm", Origin::Dnf),
            ("/lib/apk/db/installed", Origin::Apk),
        ] {
            assert_eq!(Origin::of(Path::new("/usr/bin/kiln"), &|path| path == file), origin);
            assert_eq!(Origin::of(Path::new("/usr/local/bin/kiln"), &|path| path == file), Origin::File);
        }
    }

    #[test]
    fn an_installer_tells_which_files_it_wrote() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        std::fs::create_dir_all(path("bin")).unwrap();
        std::fs::create_dir_all(path("share/doc/kiln")).unwrap();
        for file in ["bin/kiln", "kiln.1"] {
            std::fs::write(path(file), "x").unwrap();
        }
        assert_eq!(files_of(&path("bin/kiln")), [path("bin/kiln")]);
        // As install.sh writes it, and with lines that it does not write.
        let list = path("share/doc/kiln/installed.txt");
        std::fs::write(&list, "kiln.1\nbin/kiln\ndeleted\nbin/../kiln.1\n/etc/passwd\n").unwrap();
        assert_eq!(files_of(&path("bin/kiln")), [path("kiln.1"), path("bin/kiln"), list]);
        // Another program's list.
        assert_eq!(files_of(&path("bin/other")), [path("bin/other")]);
        // As install.ps1 writes it, beside the program.
        std::fs::write(path("bin/installed.txt"), "kiln\r\n").unwrap();
        assert_eq!(files_of(&path("bin/kiln")), [path("bin/kiln"), path("bin/installed.txt")]);
    }

    #[test]
    fn paths_in_commands_are_quoted() {
        assert_eq!(quoted_for_sh("/home/me/.cache/kiln"), "/home/me/.cache/kiln");
        assert_eq!(quoted_for_sh("/home/o'me/my models; x"), r"'/home/o'\''me/my models; x'");
        assert_eq!(quoted_for_powershell(r"C:\o'me\$x"), r"'C:\o''me\$x'");
    }
}
