//! The cache, in the layout of Hugging Face's own programs:
//!
//! ```text
//! models--owner--repo/blobs/<hash>                 the files, each once
//!                     refs/main                    the commit of a revision
//!                     snapshots/<commit>/<path>    links to blobs
//! ```
//!
//! Where the system has no symbolic links for the user, as Windows by default, the files themselves lie in the snapshots.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use kiln_base::TemporaryFolder;
use kiln_family::Companion;

use crate::error::io;
use crate::name::is_path_component;
use crate::remote_file::RemoteFile;
use crate::select::{COMPONENTS, is_weights, matching};
use crate::{ModelName, Result};

const MODELS: &str = "models--";

/// The cache folder.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

/// A repository in the cache at one revision, possibly incomplete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstalledModel {
    /// `owner/repo`.
    pub repo: String,
    /// A branch, tag or commit.
    pub revision: String,
    /// Its folder in the cache.
    pub folder: PathBuf,
    /// The folder of its current snapshot.
    pub snapshot: PathBuf,
    /// The repository's size on disk, including other snapshots.
    pub bytes: u64,
    /// Whether a download is unfinished.
    pub incomplete: bool,
    /// Weight files, relative to the snapshot.
    pub weights: Vec<String>,
    /// Whether it is a whole model in diffusers' layout.
    pub is_model: bool,
}

/// A model inside a repository: all of it, or one weight file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedModel {
    /// The name that [`Cache::find`] resolves to the path.
    pub name: ModelName,
    /// The folder of a whole model, or the weight file.
    pub path: PathBuf,
    /// Its size.
    pub bytes: u64,
}

impl InstalledModel {
    /// Whether it is a whole model and nothing of it is missing.
    pub fn is_complete(&self) -> bool {
        self.is_model && !self.incomplete
    }

    /// The models of this repository: the whole model, and each weight file that is not one of its components.
    pub fn models(&self) -> Vec<NamedModel> {
        let files: Vec<&String> = if self.is_model {
            self.weights.iter().filter(|path| !is_component(path)).collect()
        } else {
            self.weights.iter().collect()
        };
        let name = |pattern: Option<&String>| ModelName {
            repo: self.repo.clone(),
            revision: self.revision.clone(),
            pattern: pattern.cloned(),
        };
        let size = |path: &Path| path.metadata().map_or(0, |metadata| metadata.len());
        let whole = self.is_model.then(|| {
            let components = files_below(&self.snapshot).into_iter().filter(|path| !files.contains(&path));
            let bytes = components.map(|path| size(&self.snapshot.join(path))).sum();
            NamedModel { name: name(None), path: self.snapshot.clone(), bytes }
        });
        let only = self.only_weights();
        let file = |path: &String| {
            let pattern = if only == Some(path) { None } else { Some(path) };
            let (name, path) = (name(pattern), self.snapshot.join(path));
            NamedModel { name, bytes: size(&path), path }
        };
        whole.into_iter().chain(files.iter().map(|path| file(path))).collect()
    }

    /// The weight file that stands for the repository: the only one, unless it is a component of a larger model.
    fn only_weights(&self) -> Option<&String> {
        match &self.weights[..] {
            [file] if !self.is_model && !is_component(file) => Some(file),
            _ => None,
        }
    }
}

/// Whether a file lies in the folder of a component.
fn is_component(path: &str) -> bool {
    path.split_once('/').is_some_and(|(folder, _)| COMPONENTS.contains(&folder))
}

impl Cache {
    /// A cache in this folder, which need not exist.
    pub fn new(folder: impl Into<PathBuf>) -> Cache {
        Cache { folder: folder.into() }
    }

    /// The cache folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn repo(&self, repo: &str) -> PathBuf {
        self.folder.join(format!("{MODELS}{}", repo.replace('/', "--")))
    }

    /// All installed repositories, sorted by name, with an entry for each revision.
    pub fn list(&self) -> Vec<InstalledModel> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let repo = |entry: fs::DirEntry| {
            let name = entry.file_name().into_string().ok()?;
            let (owner, repo) = name.strip_prefix(MODELS)?.split_once("--")?;
            (is_path_component(owner) && is_path_component(repo)).then(|| format!("{owner}/{repo}"))
        };
        let mut repos: Vec<String> = entries.filter_map(repo).collect();
        repos.sort();
        let entries = |repo: &String| {
            let revisions = self.revisions(repo);
            revisions.into_iter().filter_map(|revision| self.installed(repo, &revision)).collect::<Vec<_>>()
        };
        repos.iter().flat_map(entries).collect()
    }

    /// The revisions of a repository that lead to different commits, `main` first.
    fn revisions(&self, repo: &str) -> Vec<String> {
        let folder = self.repo(repo);
        let mut revisions = files_below(&folder.join("refs"));
        revisions.sort_by_key(|revision| revision != "main");
        let mut commits = BTreeSet::new();
        revisions.retain(|revision| {
            let commit = fs::read_to_string(folder.join("refs").join(revision));
            commit.is_ok_and(|commit| commits.insert(commit.trim().to_owned()))
        });
        if revisions.is_empty() && !is_incomplete(&folder) {
            // Pulled by its commit, which needs no reference.
            let snapshots = fs::read_dir(folder.join("snapshots")).into_iter().flatten().flatten();
            revisions.extend(snapshots.filter_map(|entry| entry.file_name().into_string().ok()));
            revisions.sort();
        }
        if revisions.is_empty() {
            revisions.push("main".into());
        }
        revisions
    }

    /// A repository at a revision, if any of it is in the cache.
    pub fn installed(&self, repo: &str, revision: &str) -> Option<InstalledModel> {
        let folder = self.repo(repo);
        let commit = fs::read_to_string(folder.join("refs").join(revision)).ok();
        let commit = commit.map_or_else(|| revision.to_owned(), |text| text.trim().to_owned());
        let snapshot = folder.join("snapshots").join(Some(commit).filter(|c| is_path_component(c))?);
        let files = files_below(&snapshot);
        let bytes = size_on_disk(&folder);
        if files.is_empty() && bytes == 0 {
            return None;
        }
        let weights: Vec<String> = files.into_iter().filter(|path| is_weights(path)).collect();
        // With the index alone, such as after `kiln pull NAME:*.json`, there is no model yet.
        let has_transformer = weights.iter().any(|path| path.starts_with("transformer/"));
        Some(InstalledModel {
            repo: repo.to_owned(),
            revision: revision.to_owned(),
            is_model: has_transformer && snapshot.join("model_index.json").is_file(),
            weights,
            incomplete: is_incomplete(&folder),
            folder,
            snapshot,
            bytes,
        })
    }

    /// Resolves a name to a path: the folder of a whole model, or the only matching weight file.
    pub fn find(&self, name: &ModelName) -> Result<Option<PathBuf>> {
        let Some(installed) = self.installed(&name.repo, &name.revision) else { return Ok(None) };
        let file = match &name.pattern {
            None if installed.is_model => return Ok(Some(installed.snapshot)),
            None => installed.only_weights(),
            Some(pattern) => match matching(pattern, &installed.weights, |path| path)[..] {
                [file] => Some(file),
                _ => None,
            },
        };
        Ok(file.map(|file| installed.snapshot.join(file)))
    }

    /// The companions to pull with a model: all but those in whose place the cache has another file.
    pub(crate) fn companions_to_pull(&self, name: &ModelName) -> Vec<ModelName> {
        let whole = name.alias().and_then(|alias| alias.whole);
        if whole.and_then(|repo| self.installed(repo, "main")).is_some_and(|model| model.is_complete()) {
            return Vec::new();
        }
        let has = |repo: &str, file: &str| !self.files(&ModelName::file(repo, file)).is_empty();
        let is_replaced = |companion: &Companion| {
            !has(companion.repo, companion.file) && has(companion.repo, companion.alternatives)
        };
        let needed = name.needed().iter().filter(|companion| !is_replaced(companion));
        needed.map(|companion| ModelName::file(companion.repo, companion.file)).collect()
    }

    /// The files of a repository that a name means, relative to the snapshot, with their sizes.
    pub fn files(&self, name: &ModelName) -> Vec<(String, u64)> {
        let Some(installed) = self.installed(&name.repo, &name.revision) else { return Vec::new() };
        let all = files_below(&installed.snapshot);
        let files: Vec<String> = match &name.pattern {
            Some(pattern) => matching(pattern, &all, |path| path).into_iter().cloned().collect(),
            None => all,
        };
        let size =
            |path: &String| installed.snapshot.join(path).metadata().map_or(0, |metadata| metadata.len());
        files.into_iter().map(|path| (path.clone(), size(&path))).collect()
    }

    /// Removes a repository. Returns the number of bytes freed.
    pub fn remove(&self, repo: &str) -> Result<u64> {
        let folder = self.repo(repo);
        let bytes = size_on_disk(&folder);
        kiln_base::remove_stale(&self.folder);
        // All or nothing: Windows removes no file that is in use, and renames no folder that has one.
        let away = TemporaryFolder::create(&self.folder).and_then(|away| {
            kiln_base::rename(&folder, &away.path().join("removed"))?;
            Ok(away)
        });
        let away = away.map_err(io("remove", folder))?;
        fs::remove_dir_all(away.path().join("removed")).map_err(io("remove", away.path()))?;
        Ok(bytes)
    }

    /// Removes the matching files of a repository, and their blobs unless other files use them. Returns the number of bytes
    /// freed.
    pub fn remove_matching(&self, repo: &str, pattern: &str) -> Result<u64> {
        self.remove_files(repo, &|_, files| {
            matching(pattern, files, |path| path).into_iter().cloned().collect()
        })
    }

    /// Removes a revision of a repository, and its blobs unless other revisions use them. Returns the number of bytes
    /// freed.
    pub fn remove_revision(&self, repo: &str, revision: &str) -> Result<u64> {
        let Some(installed) = self.installed(repo, revision) else { return Ok(0) };
        if self.revisions(repo).len() <= 1 {
            return self.remove(repo);
        }
        let of_revision = |snapshot: &Path, files: &[String]| {
            if snapshot == installed.snapshot { files.to_vec() } else { Vec::new() }
        };
        let bytes = self.remove_files(repo, &of_revision)?;
        let reference = installed.folder.join("refs").join(revision);
        if reference.is_file() {
            fs::remove_file(&reference).map_err(io("remove", &reference))?;
        }
        fs::remove_dir_all(&installed.snapshot).map_err(io("remove", &installed.snapshot))?;
        Ok(bytes)
    }

    /// Removes the files that `select` chooses of each snapshot's, and blobs that no other file uses. Nothing is left of a
    /// repository without files.
    fn remove_files(&self, repo: &str, select: &dyn Fn(&Path, &[String]) -> Vec<String>) -> Result<u64> {
        let folder = self.repo(repo);
        let (mut kept, mut removed, mut bytes) = (BTreeSet::new(), BTreeSet::new(), 0);
        for snapshot in fs::read_dir(folder.join("snapshots")).into_iter().flatten().flatten() {
            let files = files_below(&snapshot.path());
            let chosen = select(&snapshot.path(), &files);
            for file in files {
                let path = snapshot.path().join(&file);
                let blob = fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
                if chosen.contains(&file) {
                    bytes += own_size(&path);
                    fs::remove_file(&path).map_err(io("remove", &path))?;
                    removed.insert(blob);
                } else {
                    kept.insert(blob);
                }
            }
        }
        if kept.is_empty() && !is_incomplete(&folder) {
            return Ok(bytes + self.remove(repo)?);
        }
        let blobs = fs::canonicalize(folder.join("blobs")).unwrap_or_default();
        // A link may lead anywhere: only files in the cache are removed.
        for blob in removed.difference(&kept).filter(|blob| blob.parent() == Some(&blobs)) {
            bytes += fs::metadata(blob).map_or(0, |metadata| metadata.len());
            fs::remove_file(blob).map_err(io("remove", blob))?;
        }
        Ok(bytes)
    }

    fn snapshot_file(&self, repo: &str, commit: &str, path: &str) -> PathBuf {
        self.repo(repo).join("snapshots").join(commit).join(path)
    }

    /// Whether a snapshot has a file, or a link to it.
    pub(crate) fn is_in_snapshot(&self, repo: &str, commit: &str, file: &RemoteFile) -> bool {
        let found = self.snapshot_file(repo, commit, &file.path).metadata();
        found.is_ok_and(|found| found.is_file() && found.len() == file.size)
    }

    /// The bytes of a file that are downloaded already.
    pub(crate) fn downloaded(&self, repo: &str, commit: &str, file: &RemoteFile) -> u64 {
        let blob = self.repo(repo).join("blobs").join(&file.hash);
        let size = |path: &Path| path.metadata().map_or(0, |metadata| metadata.len());
        if self.is_in_snapshot(repo, commit, file) {
            return file.size;
        }
        size(&blob).max(size(&blob.with_extension("incomplete")))
    }

    /// Links a blob into a snapshot, in place of what is there. Without symbolic links, the blob itself becomes the file.
    pub(crate) fn link(&self, repo: &str, commit: &str, path: &str, hash: &str) -> Result<()> {
        let file = self.snapshot_file(repo, commit, path);
        let blob = self.repo(repo).join("blobs").join(hash);
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder).map_err(io("create", folder))?;
        }
        // A dangling link would be in the way.
        let _ = fs::remove_file(&file);
        let parents = "../".repeat(2 + path.split('/').count() - 1);
        let linked = symlink(&PathBuf::from(format!("{parents}blobs/{hash}")), &file);
        // Wine says that it has made a link, and has not.
        if linked.is_ok() && file.exists() {
            return Ok(());
        }
        kiln_base::rename(&blob, &file).map_err(io("write", &file))
    }

    /// Records the commit of a revision.
    pub(crate) fn set_revision(&self, repo: &str, revision: &str, commit: &str) -> Result<()> {
        if revision == commit {
            return Ok(());
        }
        let file = self.repo(repo).join("refs").join(revision);
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder).map_err(io("create", folder))?;
        }
        fs::write(&file, commit).map_err(io("write", file))
    }
}

#[cfg(unix)]
fn symlink(target: &Path, link: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(target, link)
}

#[cfg(windows)]
fn symlink(target: &Path, link: &Path) -> std::io::Result<()> {
    // A link's target is taken as it is, and Windows follows no `/`.
    std::os::windows::fs::symlink_file(target.components().collect::<PathBuf>(), link)
}

/// The blobs of a repository: their paths and sizes.
fn blobs(folder: &Path) -> impl Iterator<Item = (PathBuf, u64)> {
    let entries = fs::read_dir(folder.join("blobs")).into_iter().flatten().flatten();
    entries.map(|entry| (entry.path(), entry.metadata().map_or(0, |metadata| metadata.len())))
}

/// The size of a repository: that of its blobs, and of files that lie in the snapshots themselves.
fn size_on_disk(folder: &Path) -> u64 {
    let snapshots = folder.join("snapshots");
    let files = files_below(&snapshots).into_iter().map(|path| own_size(&snapshots.join(path)));
    blobs(folder).map(|(_, bytes)| bytes).chain(files).sum()
}

/// The size of a file; 0 for a link.
fn own_size(path: &Path) -> u64 {
    path.symlink_metadata().ok().filter(|metadata| metadata.is_file()).map_or(0, |metadata| metadata.len())
}

/// Whether a download into a repository's folder is unfinished.
fn is_incomplete(folder: &Path) -> bool {
    blobs(folder).any(|(path, _)| path.extension().is_some_and(|e| e == "incomplete"))
}

/// The files below a folder, relative to it.
fn files_below(folder: &Path) -> Vec<String> {
    let mut files = Vec::new();
    list_files(folder, folder, &mut files);
    files
}

/// Collects the files below `folder`, relative to `root`, sorted within each folder.
fn list_files(root: &Path, folder: &Path, out: &mut Vec<String>) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        // Links to folders are not followed: they may form a cycle.
        if path.is_dir() && !path.is_symlink() {
            list_files(root, &path, out);
        } else if path.is_file()
            && let Ok(relative) = path.strip_prefix(root)
        {
            out.push(relative.to_string_lossy().replace('\\', "/"));
        }
    }
}
