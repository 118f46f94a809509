//! Where pictures go: checked before the work, written whole after it, and never over a file that was not asked for.

use std::fs;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::{Path, PathBuf};

use kiln_image::{Format, Picture};

use crate::failure::{Failure, While};
use kiln_engine::ImagePlan;

const OTHER_PLACE: &str = "choose another place with -o, or make the folder first";
const OTHER_NAME: &str = "choose another name with -o";

/// Where the pictures of a run go.
#[derive(Debug, PartialEq)]
pub enum Output {
    /// Standard output, as PNG.
    Stdout,
    /// One picture, one file; overwritten if it exists.
    File { path: PathBuf, format: Format },
    /// Several pictures, `path` with numbers from `first`; all of them new.
    Numbered { path: PathBuf, format: Format, first: usize },
    /// A new name from prompt and seed in the current folder.
    Named,
}

impl Output {
    /// Checks that `pictures` can be written to where `-o` says.
    pub fn check(asked: Option<&Path>, pictures: usize) -> Result<Output, Failure> {
        let Some(path) = asked else {
            writable(Path::new(".")).map_err(|failure| failure.hint(OTHER_PLACE))?;
            return Ok(Output::Named);
        };
        if path == Path::new("-") {
            if pictures > 1 {
                return Err(Failure::usage(format!("{pictures} pictures don't fit into standard output"))
                    .hint("name a file with -o; it gets numbers"));
            }
            if std::io::stdout().is_terminal() {
                return Err(Failure::usage(
                    "standard output is a terminal, no place for the bytes of a picture",
                )
                .hint("send it into a file or a program, or use --preview"));
            }
            return Ok(Output::Stdout);
        }
        let format = Format::from_path(path)?;
        if path.is_dir() {
            return Err(Failure::new(format!("can't write `{}`: it is a folder", path.display()))
                .hint("name a file in it"));
        }
        if pictures > 1 {
            writable(folder_of(path)).map_err(|failure| failure.hint(OTHER_PLACE))?;
            let first = first_free(path, pictures);
            // The longest of the names: the system may allow the shorter ones only.
            nameable(&numbered(path, first + pictures - 1)).map_err(|failure| failure.hint(OTHER_NAME))?;
            return Ok(Output::Numbered { path: path.into(), format, first });
        }
        let target = behind_links(path).map_err(|failure| failure.hint(OTHER_NAME))?;
        writable(folder_of(&target)).map_err(|failure| failure.hint(OTHER_PLACE))?;
        nameable(&target).map_err(|failure| failure.hint(OTHER_NAME))?;
        if fs::metadata(&target).is_ok_and(|about| about.permissions().readonly()) {
            return Err(
                Failure::new(format!("can't write `{}`: it is read-only", path.display())).hint(OTHER_NAME)
            );
        }
        Ok(Output::File { path: path.into(), format })
    }

    /// Writes picture number `index` (from 0), and says where it went.
    pub fn write(
        &self,
        picture: &Picture,
        recipe: Option<&str>,
        plan: &ImagePlan,
        index: usize,
    ) -> Result<PathBuf, Failure> {
        let (path, format) = match self {
            Output::Stdout => (PathBuf::from("-"), Format::Png),
            Output::File { path, format } => (path.clone(), *format),
            Output::Numbered { path, format, first } => (numbered(path, first + index), *format),
            Output::Named => (default_name(plan), Format::Png),
        };
        let bytes = kiln_image::encode(picture, format, recipe)?;
        match self {
            Output::Stdout => {
                let mut out = std::io::stdout().lock();
                out.write_all(&bytes)
                    .and_then(|()| out.flush())
                    .map_err(|e| stdout_failed("the picture", &e))?;
            }
            _ => {
                let target = behind_links(&path)?;
                kiln_image::write_atomic(&target, &bytes).while_doing(|| "saving the picture".into())?;
            }
        }
        Ok(path)
    }

    /// Checks that latents can be written to where `--latents-out` says, and not over one of the pictures.
    pub fn check_latents(&self, path: &Path, pictures: usize) -> Result<(), Failure> {
        const HINT: &str = "choose another place with --latents-out, or make the folder first";
        if path == Path::new("-") {
            return Err(Failure::usage("--latents-out can't write to standard output")
                .hint("latents are a safetensors file: name one with --latents-out"));
        }
        if path.exists() && !path.is_file() {
            return Err(Failure::new(format!("can't write `{}`: it is not a regular file", path.display()))
                .hint("name a file with --latents-out"));
        }
        let target = behind_links(path).map_err(|failure| failure.hint(HINT))?;
        writable(folder_of(&target)).map_err(|failure| failure.hint(HINT))?;
        nameable(&target).map_err(|failure| failure.hint(HINT))?;
        let taken = match self {
            Output::File { path, .. } => same_file(&target, path),
            Output::Numbered { path, first, .. } => {
                (0..pictures).any(|index| same_file(&target, &numbered(path, first + index)))
            }
            // Any name that a picture could get.
            Output::Named => Format::from_path(&target).is_ok(),
            Output::Stdout => false,
        };
        if taken {
            return Err(Failure::usage(format!(
                "the latents would overwrite a picture: `{}`",
                path.display()
            ))
            .hint("name another file with --latents-out, such as latents.safetensors"));
        }
        Ok(())
    }
}

/// A failure to write to standard output, which knows no place to go instead.
pub fn stdout_failed(what: &str, error: &io::Error) -> Failure {
    Failure::new(format!("can't write {what} to standard output: {error}"))
        .hint("look at what standard output is sent to: a disk that is full, or a program that has ended")
}

/// The file that a name leads to, which may be yet to be made. Replacing a link itself would leave the file it stands
/// for as it was.
pub fn behind_links(path: &Path) -> Result<PathBuf, Failure> {
    // As many as Linux follows.
    const MOST: usize = 40;
    match fs::metadata(path) {
        Ok(about) if about.is_file() => return Ok(fs::canonicalize(path).unwrap_or_else(|_| path.into())),
        // A pipe's or a device's link has no file behind it.
        Ok(_) => return Ok(path.into()),
        Err(_) => {}
    }
    let mut target = path.to_path_buf();
    for _ in 0..MOST {
        match fs::read_link(&target) {
            // A relative link starts in the folder it lies in.
            Ok(next) => target = folder_of(&target).join(next),
            Err(_) => return Ok(target),
        }
    }
    Err(Failure::new(format!("can't write `{}`: it is a link that leads in a circle", path.display())))
}

/// Whether two names lead to one file, also where that is yet to be made.
fn same_file(a: &Path, b: &Path) -> bool {
    let place = |path: &Path| {
        let target = behind_links(path).ok()?;
        Some(fs::canonicalize(folder_of(&target)).ok()?.join(target.file_name()?))
    };
    place(a).is_some_and(|a| Some(a) == place(b))
}

/// Checks that the system takes the name, such as that it is not too long.
fn nameable(path: &Path) -> Result<(), Failure> {
    match fs::symlink_metadata(path) {
        Err(e) if e.kind() != ErrorKind::NotFound => {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let why = match e.kind() {
                ErrorKind::InvalidFilename => format!("a name of {} bytes is too long", name.len()),
                _ => e.to_string(),
            };
            Err(Failure::new(format!("can't write `{}`: {why}", path.display())))
        }
        _ => Ok(()),
    }
}

/// Whether a new file can be made in `folder`: by making one that vanishes again.
pub fn writable(folder: &Path) -> Result<(), Failure> {
    let about = |what: String| Failure::new(format!("can't write into `{}`: {what}", folder.display()));
    match tempfile::Builder::new().prefix(".kiln-").tempfile_in(folder) {
        Ok(file) => file.close().map_err(|e| about(e.to_string())),
        Err(_) if !folder.exists() => Err(about("there is no such folder".into())),
        // The system's own words, without the name of the file that could not be made.
        Err(e) => Err(about(std::io::Error::from(e.kind()).to_string())),
    }
}

fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// `out.png` → `out-3.png`
fn numbered(path: &Path, number: usize) -> PathBuf {
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    let extension = path.extension().unwrap_or_default().to_string_lossy();
    path.with_file_name(format!("{stem}-{number}.{extension}"))
}

/// The first number from which on `count` names are free.
fn first_free(path: &Path, count: usize) -> usize {
    let mut first = 1;
    while let Some(taken) = (first..first + count).rev().find(|&n| numbered(path, n).exists()) {
        first = taken + 1;
    }
    first
}

/// `a-red-fox-42.png`, or the same with a number if that is taken.
fn default_name(plan: &ImagePlan) -> PathBuf {
    let words = plan.prompt.as_deref().map(slug).filter(|s| !s.is_empty());
    let seed = plan.seed.map_or("noise".into(), |seed| seed.to_string());
    let path = PathBuf::from(format!("{}-{seed}.png", words.as_deref().unwrap_or("picture")));
    if !path.exists() {
        return path;
    }
    let mut number = 2;
    while numbered(&path, number).exists() {
        number += 1;
    }
    numbered(&path, number)
}

/// The first words of a prompt as a file name.
fn slug(prompt: &str) -> String {
    const LONGEST: usize = 48;
    let mut slug = String::new();
    for word in prompt.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty()) {
        let word = word.to_lowercase();
        let room = LONGEST.saturating_sub(slug.len() + 1);
        if slug.is_empty() {
            // A first word that is too long is cut, at a character's boundary.
            slug.extend(word.char_indices().take_while(|(i, c)| i + c.len_utf8() <= LONGEST).map(|(_, c)| c));
        } else if word.len() <= room {
            slug.push('-');
            slug.push_str(&word);
        } else {
            break;
        }
    }
    slug
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slug_is_short_and_has_no_odd_characters() {
        assert_eq!(slug("A red fox, in the SNOW!"), "a-red-fox-in-the-snow");
        assert_eq!(slug("../../etc/passwd"), "etc-passwd");
        assert_eq!(slug("  …  "), "");
        assert_eq!(slug("雪の中の狐"), "雪の中の狐");
        let long = slug(&"word ".repeat(40));
        assert!(long.len() <= 48 && long.ends_with("-word"), "{long}");
        assert!(slug(&"雪".repeat(100)).len() <= 48);
    }

    #[test]
    fn several_pictures_get_numbers_that_are_free() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("out.png");
        let first = |output| match output {
            Output::Numbered { first, .. } => first,
            other => panic!("{other:?}"),
        };
        assert_eq!(first(Output::check(Some(&path), 2).unwrap()), 1);
        std::fs::write(dir.path().join("out-2.png"), b"mine").unwrap();
        assert_eq!(first(Output::check(Some(&path), 2).unwrap()), 3);
        assert!(matches!(Output::check(Some(&path), 1).unwrap(), Output::File { .. }));
    }

    #[test]
    fn a_place_that_can_not_be_written_is_found_before_the_work() {
        let dir = tempfile::tempdir().unwrap();
        let told = |path: &Path| Output::check(Some(path), 1).unwrap_err().to_string();
        assert!(told(&dir.path().join("no/out.png")).contains("no such folder"));
        assert!(told(&dir.path().join("out.xyz")).contains(".png, .jpg, .jpeg or .webp"));
        std::fs::create_dir(dir.path().join("out.png")).unwrap();
        assert!(told(&dir.path().join("out.png")).contains("is a folder"));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "the check leaves nothing");
    }
}
