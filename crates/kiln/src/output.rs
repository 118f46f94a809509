//! Where images are written. The destination is checked before generating; files are written atomically, and only a file
//! named with `-o` is ever overwritten.

mod check;
pub mod sign;
mod template;
mod watermark;

use std::fs;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::path::{Path, PathBuf};

use kiln_engine::{Embedded, Recipe};
use kiln_image::{Encoding, Format, RgbImage};

use crate::error::{CliError, ErrorContext};
use crate::settings;
use template::numbered;
pub use template::{ImageName, Template};

const OTHER_PATH: &str = "choose another path with -o";
const OTHER_NAME: &str = "choose another name with -o";

/// The destination of a run's images.
#[derive(Debug, PartialEq)]
pub enum Output {
    /// Standard output, as PNG.
    Stdout,
    /// A single file, overwritten if it exists.
    File { path: PathBuf, format: Format },
    /// New files named after `path`, with numbers from `first`.
    Numbered { path: PathBuf, format: Format, first: usize },
    /// New files, named after a template.
    Named(Template),
}

/// How an image is saved.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// JPEG quality.
    pub quality: Option<u8>,
    /// Whether paths in the recipe are absolute instead of relative to the image.
    pub absolute_paths: bool,
    /// What the file says of how it was generated.
    pub embedded: Embedded,
}

impl Output {
    /// Checks that this number of images can be written to the path given with `-o`.
    pub fn check(path: Option<&Path>, images: usize) -> Result<Output, CliError> {
        let Some(path) = path else {
            kiln_base::remove_stale(Path::new("."));
            return Output::named(Template::default_in(&default_folder()?));
        };
        if path == Path::new("-") {
            if images > 1 {
                return Err(CliError::usage(format!(
                    "standard output takes a single image, the request has {images}"
                ))
                .hint("give a file with -o: Kiln adds numbers to its name"));
            }
            if std::io::stdout().is_terminal() {
                return Err(CliError::usage("standard output is a terminal, which can't show an image file")
                    .hint("redirect it to a file or a program, or use --preview"));
            }
            if is_stdout_closed() {
                return Err(CliError::usage("standard output is closed, and the image would be lost")
                    .hint("redirect it to a file or a program, or give a file with -o"));
            }
            return Ok(Output::Stdout);
        }
        kiln_base::remove_stale(parent_folder(path));
        let ends_as_folder = path.as_os_str().to_string_lossy().ends_with(std::path::is_separator);
        if path.is_dir() && !ends_as_folder && Format::from_path(path).is_ok() {
            return Err(CliError::new(format!("can't write `{}`: it is a folder", path.display()))
                .hint("end the name with `/` to write into the folder"));
        }
        if path.is_dir() || ends_as_folder {
            return Output::named(Template::default_in(path));
        }
        if let Some(template) = Template::parse(path)? {
            if let Some(problem) = template.windows_problem().filter(|_| cfg!(windows)) {
                let message = format!("can't write `{}`: {problem}", path.display());
                return Err(CliError::new(message).hint(OTHER_NAME));
            }
            return Output::named(template);
        }
        let format = Format::from_path(path)?;
        if images > 1 {
            check_creatable(parent_folder(path)).map_err(|error| error.hint(OTHER_PATH))?;
            let first = first_free(path, images);
            // Check the longest name: shorter ones may be allowed even if it is not.
            check_name(&numbered(path, first + images - 1)).map_err(|error| error.hint(OTHER_NAME))?;
            return Ok(Output::Numbered { path: path.into(), format, first });
        }
        let target = resolve_links(path).map_err(|error| error.hint(OTHER_NAME))?;
        check_folder_of(path, &target).map_err(|error| error.hint(OTHER_PATH))?;
        check_name(&target).map_err(|error| error.hint(OTHER_NAME))?;
        if fs::metadata(&target).is_ok_and(|metadata| metadata.permissions().readonly()) {
            return Err(
                CliError::new(format!("can't write `{}`: it is read-only", path.display())).hint(OTHER_NAME)
            );
        }
        Ok(Output::File { path: path.into(), format })
    }

    /// Checks that the folder of a template is writable, or can be created.
    fn named(template: Template) -> Result<Output, CliError> {
        check_creatable(&template.fixed_folder()).map_err(|error| error.hint(OTHER_PATH))?;
        Ok(Output::Named(template))
    }

    /// The format of the files.
    pub fn format(&self) -> Format {
        match self {
            Output::Stdout => Format::Png,
            Output::File { format, .. } | Output::Numbered { format, .. } => *format,
            Output::Named(template) => template.format,
        }
    }

    /// The format of the files with its quality.
    pub fn encoding(&self, quality: Option<u8>) -> Encoding {
        Encoding { format: self.format(), quality, small: false }
    }

    /// Whether writing may wait for another program to read.
    pub fn may_block(&self) -> bool {
        match self {
            Output::Stdout => true,
            Output::File { path, .. } => fs::metadata(path).is_ok_and(|metadata| !metadata.is_file()),
            Output::Numbered { .. } | Output::Named(_) => false,
        }
    }

    /// Writes an image and returns its path.
    pub fn write(
        &self,
        image: &RgbImage,
        recipe: Recipe,
        name: &ImageName<'_>,
        options: &SaveOptions,
    ) -> Result<PathBuf, CliError> {
        let path = match self {
            Output::Stdout => PathBuf::from("-"),
            Output::File { path, .. } => path.clone(),
            Output::Numbered { path, first, .. } => numbered(path, first + name.number - 1),
            Output::Named(template) => template.free_path(name),
        };
        let encoding = self.encoding(options.quality);
        let recipe = match self {
            _ if options.absolute_paths => recipe,
            Output::Stdout => recipe.relative_to(Path::new(".")),
            _ => recipe.relative_to(parent_folder(&path)),
        };
        let bytes = recipe.encode(image, encoding, &options.embedded)?;
        match self {
            Output::Stdout => {
                let mut out = std::io::stdout().lock();
                out.write_all(&bytes)
                    .and_then(|()| out.flush())
                    .map_err(|e| stdout_error("the image", &e))?;
            }
            _ => {
                create_folder(parent_folder(&path)).map_err(|error| error.hint(OTHER_NAME))?;
                let target = resolve_links(&path)?;
                kiln_image::write_file(&target, &bytes).with_context(|| "saving the image".into())?;
            }
        }
        Ok(path)
    }

    /// Checks that the latents can be written to the path given with `--latents-out` without overwriting an image.
    pub fn check_latents(&self, path: &Path, images: usize) -> Result<(), CliError> {
        const HINT: &str = "choose another path with --latents-out";
        if path == Path::new("-") {
            return Err(CliError::usage("--latents-out can't write to standard output")
                .hint("give a .safetensors file with --latents-out"));
        }
        if path.exists() && !path.is_file() {
            return Err(CliError::new(format!("can't write `{}`: it is not a regular file", path.display()))
                .hint("give a file with --latents-out"));
        }
        let target = resolve_links(path).map_err(|error| error.hint(HINT))?;
        check_folder_of(path, &target).map_err(|error| error.hint(HINT))?;
        check_name(&target).map_err(|error| error.hint(HINT))?;
        let taken = match self {
            Output::File { path, .. } => same_file(&target, path),
            Output::Numbered { path, first, .. } => {
                (0..images).any(|index| same_file(&target, &numbered(path, first + index)))
            }
            // Any name with an image's extension might be chosen for an image.
            Output::Named(_) => Format::from_path(&target).is_ok(),
            Output::Stdout => false,
        };
        if taken {
            return Err(CliError::usage(format!(
                "the latents would overwrite an image: `{}`",
                path.display()
            ))
            .hint("give another file with --latents-out, such as latents.safetensors"));
        }
        Ok(())
    }
}

/// Creates a folder and those above it.
pub fn create_folder(folder: &Path) -> Result<(), CliError> {
    fs::create_dir_all(folder)
        .map_err(|e| CliError::new(format!("can't create the folder `{}`: {e}", folder.display())))
}

/// Checks that a file can be created at `path`, which leads to `target`. Folders that are missing behind a link are not
/// created: the link may lead to a disk that is not there.
fn check_folder_of(path: &Path, target: &Path) -> Result<(), CliError> {
    if path.is_symlink() {
        check_writable(parent_folder(target))
    } else {
        check_creatable(parent_folder(path))
    }
}

/// Checks that files can be created in `folder`, which is created with the first of them.
pub fn check_creatable(folder: &Path) -> Result<(), CliError> {
    let exists = |folder: &&Path| folder.as_os_str().is_empty() || folder.symlink_metadata().is_ok();
    let existing = folder.ancestors().find(exists).filter(|folder| !folder.as_os_str().is_empty());
    let existing = existing.unwrap_or(Path::new("."));
    if !existing.is_dir() {
        let (folder, existing) = (folder.display(), existing.display());
        return Err(CliError::new(format!("can't write to `{folder}`: `{existing}` is not a folder")));
    }
    check_writable(existing)
}

/// Whether the program was started without a standard output. Rust then opens `/dev/null` in its place, for reading and
/// writing; shells open it for writing only.
fn is_stdout_closed() -> bool {
    const READ_AND_WRITE: u32 = 0o2;
    let null = fs::read_link("/proc/self/fd/1").is_ok_and(|target| target == Path::new("/dev/null"));
    let info = fs::read_to_string("/proc/self/fdinfo/1").unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    null && flags.is_some_and(|flags| flags & 0o3 == READ_AND_WRITE)
}

/// Writes to standard output. A closed pipe (`| head`) is not an error.
pub fn print(text: &[u8]) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    match out.write_all(text).and_then(|()| out.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => Err(stdout_error("the text", &e)),
        _ => Ok(()),
    }
}

/// Returns the error for a failed write to standard output.
pub fn stdout_error(what: &str, error: &io::Error) -> CliError {
    CliError::new(format!("can't write {what} to standard output: {error}"))
        .hint("check where standard output goes: the disk may be full, or the reading program may have ended")
}

/// Follows symbolic links to the file, which need not exist yet. Writing replaces a file by renaming, so writing to the
/// link itself would leave the file behind it unchanged.
pub fn resolve_links(path: &Path) -> Result<PathBuf, CliError> {
    // The limit of Linux.
    const MAX_LINKS: usize = 40;
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_file() => {
            return Ok(kiln_base::canonicalize(path).unwrap_or_else(|_| path.into()));
        }
        // Pipes and devices are written to directly.
        Ok(_) => return Ok(path.into()),
        Err(_) => {}
    }
    let mut target = path.to_path_buf();
    for _ in 0..MAX_LINKS {
        match fs::read_link(&target) {
            // Relative links are relative to their own folder.
            Ok(next) => target = parent_folder(&target).join(next),
            Err(_) => return Ok(target),
        }
    }
    Err(CliError::new(format!("can't write `{}`: it is a loop of symbolic links", path.display())))
}

/// Returns whether two paths are the same file, which need not exist yet.
fn same_file(a: &Path, b: &Path) -> bool {
    let resolve = |path: &Path| {
        let target = resolve_links(path).ok()?;
        let parent = parent_folder(&target);
        let parent = kiln_base::canonicalize(parent).or_else(|_| std::path::absolute(parent)).ok()?;
        Some(parent.join(target.file_name()?))
    };
    resolve(a).is_some_and(|a| Some(a) == resolve(b))
}

/// Checks that the file system accepts the name, for instance that it is not too long.
fn check_name(path: &Path) -> Result<(), CliError> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    if let Some(problem) = kiln_base::windows_name_problem(&name).filter(|_| cfg!(windows)) {
        return Err(CliError::new(format!("can't write `{}`: {problem}", path.display())));
    }
    // Windows tells only when the file is created.
    let is_too_long = cfg!(windows) && name.encode_utf16().count() > 255;
    let problem = match fs::symlink_metadata(path) {
        Err(e) if e.kind() == ErrorKind::InvalidFilename || is_too_long => {
            format!("a name of {} bytes is too long", name.len())
        }
        Err(e) if e.kind() != ErrorKind::NotFound => e.to_string(),
        _ => return Ok(()),
    };
    Err(CliError::new(format!("can't write `{}`: {problem}", path.display())))
}

/// Checks that files can be created in `folder`, by creating and removing one.
pub fn check_writable(folder: &Path) -> Result<(), CliError> {
    let error = |problem: String| CliError::new(format!("can't write to `{}`: {problem}", folder.display()));
    match tempfile::Builder::new().prefix(".kiln-").tempfile_in(folder) {
        Ok(file) => file.close().map_err(|e| error(e.to_string())),
        Err(_) if !folder.exists() => Err(error("there is no such folder".into())),
        // The system's message without the name of the temporary file.
        Err(e) => Err(error(std::io::Error::from(e.kind()).to_string())),
    }
}

pub fn parent_folder(path: &Path) -> &Path {
    path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Finds the first of `count` consecutive numbers whose names are all free.
fn first_free(path: &Path, count: usize) -> usize {
    let mut first = 1;
    while let Some(taken) = (first..first + count).rev().find(|&n| numbered(path, n).exists()) {
        first = taken + 1;
    }
    first
}

/// The folder for images without `-o`: that of the user's settings, which is created, or the current one.
fn default_folder() -> Result<PathBuf, CliError> {
    let Some(folder) = &settings::get().output_folder else {
        check_writable(Path::new(".")).map_err(|error| error.hint(OTHER_PATH))?;
        return Ok(PathBuf::new());
    };
    let hint = "choose a file with -o, or another folder with `kiln config set output_folder`";
    fs::create_dir_all(folder)
        .map_err(|e| CliError::new(format!("can't create the output folder `{}`: {e}", folder.display())))
        .and_then(|()| check_writable(folder))
        .map_err(|error| error.hint(hint))?;
    Ok(folder.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_images_get_free_numbers() {
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
    fn an_unwritable_path_is_rejected() {
        let dir = tempfile::tempdir().unwrap();
        let message = |path: &Path| Output::check(Some(path), 1).unwrap_err().to_string();
        assert!(message(&dir.path().join("out.xyz")).contains(".png, .jpg, .jpeg or .webp"));
        std::fs::write(dir.path().join("file"), b"mine").unwrap();
        for inside in ["file/x/", "file/x.png", "file/a/x.png"] {
            assert!(message(&dir.path().join(inside)).contains("is not a folder"), "{inside}");
        }
        for new in ["new/", "new/a/x.png"] {
            assert!(Output::check(Some(&dir.path().join(new)), 1).is_ok(), "{new}");
            assert!(Output::check(Some(&dir.path().join(new)), 2).is_ok(), "{new}");
        }
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "the check leaves nothing");
    }
}
