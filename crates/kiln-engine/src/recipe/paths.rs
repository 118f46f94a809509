//! Paths in recipes: relative to the image, or to the user's home, so that an image tells little about its machine.
//!
//! A relative path starts with `./`, `../` or `~/`; anything else is a name, such as a model's.

use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};

use super::Recipe;

impl Recipe {
    /// Makes absolute paths relative to `folder`, where the image is saved.
    pub fn relative_to(mut self, folder: &Path) -> Recipe {
        let folder = normalized(&std::path::absolute(folder).unwrap_or_else(|_| folder.to_path_buf()));
        let home = kiln_base::folders::home();
        self.map_paths(&|path| relative(path, &folder, home.as_deref()));
        self
    }

    /// Leaves only the names of files: an image for other machines tells nothing about this one's folders. A file is then
    /// looked for beside the image, a model by its name.
    pub fn without_folders(mut self) -> Recipe {
        let model = std::mem::take(&mut self.model.path);
        self.map_paths(&|path| match path.file_name() {
            Some(name) if path.components().count() > 1 => Path::new(".").join(name),
            _ => path.clone(),
        });
        // A name of the hub has a slash in it, too.
        let name = Path::new(&model).file_name().filter(|_| Path::new(&model).is_absolute());
        self.model.path = name.map_or_else(|| model.clone(), |name| name.to_string_lossy().into_owned());
        self
    }

    /// Makes the paths of [`Recipe::relative_to`] absolute, as seen from the image's folder, else from the current one.
    pub(super) fn found_from(mut self, folder: &Path) -> Recipe {
        let home = kiln_base::folders::home();
        self.map_paths(&|path| {
            let mut parts = path.components();
            match (parts.next(), &home) {
                (Some(Component::Normal(first)), Some(home)) if first == "~" => home.join(parts.as_path()),
                (Some(Component::CurDir | Component::ParentDir), _) => {
                    let absolute = |path: &Path| std::path::absolute(path).map(|path| normalized(&path)).ok();
                    let (beside, here) = (absolute(&folder.join(path)), absolute(path));
                    let exists = |path: &PathBuf| path.exists();
                    let found = beside.clone().filter(exists).or(here.filter(exists)).or(beside);
                    found.unwrap_or_else(|| path.clone())
                }
                _ => path.to_path_buf(),
            }
        });
        self
    }

    fn map_paths(&mut self, map: &dyn Fn(&PathBuf) -> PathBuf) {
        let request = &mut self.request;
        request.images_mut().for_each(|file| file.path = map(&file.path));
        request.loras.iter_mut().for_each(|lora| lora.path = map(&lora.path));
        for file in [&mut request.noise, &mut request.vae, &mut request.embeds].into_iter().flatten() {
            file.path = map(&file.path);
        }
        let overrides = &mut self.model.overrides;
        let components = [&mut overrides.transformer, &mut overrides.text_encoder, &mut overrides.tokenizer];
        for path in components.into_iter().flatten().chain([&mut self.model.path]) {
            *path = map(&PathBuf::from(&*path)).to_string_lossy().into_owned();
        }
    }
}

/// Returns a path relative to `folder`, or to `home` if that is nearer than the root.
fn relative(path: &Path, folder: &Path, home: Option<&Path>) -> PathBuf {
    if !path.is_absolute() {
        return path.to_path_buf();
    }
    let path = normalized(path);
    let normal = |part: &Component<'_>| matches!(part, Component::Normal(_));
    let pairs = path.components().zip(folder.components()).take_while(|(a, b)| a == b);
    let shared = pairs.clone().count();
    if !pairs.map(|(part, _)| part).any(|part| normal(&part))
        && let Some(inside) = home.and_then(|home| path.strip_prefix(home).ok())
    {
        return joined([OsStr::new("~")].into_iter().chain(inside));
    }
    // On another drive of Windows.
    if shared == 0 {
        return path;
    }
    let up = folder.components().skip(shared).map(|_| OsStr::new(".."));
    let start = if folder.components().count() == shared { Some(OsStr::new(".")) } else { None };
    joined(start.into_iter().chain(up).chain(path.components().skip(shared).map(Component::as_os_str)))
}

/// A path with slashes, which every system reads.
fn joined<'a>(parts: impl Iterator<Item = &'a OsStr>) -> PathBuf {
    let mut text = OsString::new();
    for part in parts {
        if !text.is_empty() {
            text.push("/");
        }
        text.push(part);
    }
    text.into()
}

/// Removes `.` and `..` from an absolute path, without asking the file system.
fn normalized(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => drop(out.pop()),
            part => out.push(part),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(windows)]
    #[test]
    fn paths_of_windows_are_relative_with_slashes_unless_on_another_drive() {
        let from = |path: &str, folder: &str| {
            relative(Path::new(path), Path::new(folder), Some(Path::new(r"C:\Users\me")))
                .display()
                .to_string()
        };
        assert_eq!(from(r"C:\Users\me\a\r.png", r"C:\Users\me\a"), "./r.png");
        assert_eq!(from(r"c:/pics/in/r.png", r"C:\pics\out"), "../in/r.png");
        assert_eq!(from(r"C:\Users\me\models\klein", r"D:\out"), "~/models/klein");
        assert_eq!(from(r"E:\klein", r"D:\out"), r"E:\klein");
    }

    #[cfg(unix)]
    #[test]
    fn paths_are_relative_to_the_image_or_to_home() {
        let home = Some(Path::new("/home/me"));
        let from = |path: &str, folder: &str| {
            relative(Path::new(path), Path::new(folder), home).display().to_string()
        };
        assert_eq!(from("/home/me/a/r.png", "/home/me/a"), "./r.png");
        assert_eq!(from("/home/me/b/../in/r.png", "/home/me/a"), "../in/r.png");
        assert_eq!(from("/home/me/models/klein", "/tmp/out"), "~/models/klein");
        assert_eq!(from("/data/klein", "/tmp/out"), "../../data/klein");
        assert_eq!(from("ember", "/tmp"), "ember");
    }
}
