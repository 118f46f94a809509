//! The cache, in the layout of Hugging Face's own programs:
//!
//! ```text
//! models--owner--repo/blobs/<hash>                 the files, each once
//!                     refs/main                    the commit of a revision
//!                     snapshots/<commit>/<path>    links to blobs
//! ```

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::io;
use crate::name::is_path_component;
use crate::select::{is_weights, matches};
use crate::{ModelName, Result};

const MODELS: &str = "models--";

/// The cache folder.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

/// A repository in the cache, possibly incomplete.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstalledModel {
    /// `owner/repo`.
    pub repo: String,
    /// Its folder in the cache.
    pub folder: PathBuf,
    /// The folder of its current snapshot.
    pub snapshot: PathBuf,
    /// Its size on disk, including older snapshots.
    pub bytes: u64,
    /// Whether a download is unfinished.
    pub incomplete: bool,
    /// Weight files, relative to the snapshot.
    pub weights: Vec<String>,
    /// Whether it is a whole model in diffusers' layout.
    pub is_model: bool,
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

    /// All installed models, sorted by name.
    pub fn list(&self) -> Vec<InstalledModel> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let repo = |entry: fs::DirEntry| {
            let name = entry.file_name().into_string().ok()?;
            let (owner, repo) = name.strip_prefix(MODELS)?.split_once("--")?;
            (is_path_component(owner) && is_path_component(repo)).then(|| format!("{owner}/{repo}"))
        };
        let mut repos: Vec<String> = entries.filter_map(repo).collect();
        repos.sort();
        repos.iter().filter_map(|repo| self.installed(repo, "main")).collect()
    }

    /// A repository at a revision, if any of it is in the cache.
    pub fn installed(&self, repo: &str, revision: &str) -> Option<InstalledModel> {
        let folder = self.repo(repo);
        let commit = fs::read_to_string(folder.join("refs").join(revision)).ok();
        let commit = commit.map_or_else(|| revision.to_owned(), |text| text.trim().to_owned());
        let snapshot = folder.join("snapshots").join(Some(commit).filter(|c| is_path_component(c))?);
        let mut files = Vec::new();
        list_files(&snapshot, &snapshot, &mut files);
        let (mut bytes, mut incomplete) = (0, false);
        for entry in fs::read_dir(folder.join("blobs")).into_iter().flatten().flatten() {
            bytes += entry.metadata().map_or(0, |metadata| metadata.len());
            incomplete |= entry.path().extension().is_some_and(|e| e == "incomplete");
        }
        if files.is_empty() && bytes == 0 {
            return None;
        }
        Some(InstalledModel {
            repo: repo.to_owned(),
            is_model: snapshot.join("model_index.json").is_file(),
            weights: files.into_iter().filter(|path| is_weights(path)).collect(),
            folder,
            snapshot,
            bytes,
            incomplete,
        })
    }

    /// Resolves a name to a path: the folder of a whole model, or the only matching weight file.
    pub fn find(&self, name: &ModelName) -> Result<Option<PathBuf>> {
        let Some(installed) = self.installed(&name.repo, &name.revision) else { return Ok(None) };
        if installed.is_model && name.pattern.is_none() {
            return Ok(Some(installed.snapshot));
        }
        let is_match = |path: &&String| name.pattern.as_ref().is_none_or(|pattern| matches(pattern, path));
        let matching: Vec<&String> = installed.weights.iter().filter(is_match).collect();
        Ok(match matching[..] {
            [file] => Some(installed.snapshot.join(file)),
            _ => None,
        })
    }

    /// Removes a repository. Returns the number of bytes freed.
    pub fn remove(&self, repo: &str) -> Result<u64> {
        let bytes = self.installed(repo, "main").map_or(0, |installed| installed.bytes);
        let folder = self.repo(repo);
        fs::remove_dir_all(&folder).map_err(io("remove", folder))?;
        Ok(bytes)
    }

    /// Removes the matching files of a repository, and their blobs unless other files use them. Returns the number of bytes
    /// freed.
    pub fn remove_matching(&self, repo: &str, pattern: &str) -> Result<u64> {
        let folder = self.repo(repo);
        let (mut kept, mut removed) = (BTreeSet::new(), BTreeSet::new());
        for snapshot in fs::read_dir(folder.join("snapshots")).into_iter().flatten().flatten() {
            let mut files = Vec::new();
            list_files(&snapshot.path(), &snapshot.path(), &mut files);
            for file in files {
                let path = snapshot.path().join(&file);
                let blob = fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
                if matches(pattern, &file) {
                    fs::remove_file(&path).map_err(io("remove", &path))?;
                    removed.insert(blob);
                } else {
                    kept.insert(blob);
                }
            }
        }
        let blobs = fs::canonicalize(folder.join("blobs")).unwrap_or_default();
        let mut bytes = 0;
        // A link may lead anywhere: only files in the cache are removed.
        for blob in removed.difference(&kept).filter(|blob| blob.parent() == Some(&blobs)) {
            bytes += fs::metadata(blob).map_or(0, |metadata| metadata.len());
            fs::remove_file(blob).map_err(io("remove", blob))?;
        }
        Ok(bytes)
    }

    /// Links a blob into a snapshot.
    pub(crate) fn link(&self, repo: &str, commit: &str, path: &str, hash: &str) -> Result<()> {
        let file = self.repo(repo).join("snapshots").join(commit).join(path);
        let blob = self.repo(repo).join("blobs").join(hash);
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder).map_err(io("create", folder))?;
        }
        if file.exists() {
            return Ok(());
        }
        // A dangling link would be in the way.
        let _ = fs::remove_file(&file);
        let parents = "../".repeat(2 + path.split('/').count() - 1);
        let linked = symlink(&PathBuf::from(format!("{parents}blobs/{hash}")), &file);
        // Symbolic links may need special rights (Windows): fall back to a hard link, then to a copy.
        let linked = linked.or_else(|_| fs::hard_link(&blob, &file));
        linked.or_else(|_| fs::copy(&blob, &file).map(drop)).map_err(io("write", &file))
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
    std::os::windows::fs::symlink_file(target, link)
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
