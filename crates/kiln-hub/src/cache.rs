//! The cache as the hub's own programs lay it out:
//!
//! ```text
//! models--owner--repo/blobs/<hash>                 the files, each once
//!                     refs/main                    the commit that a revision stands for
//!                     snapshots/<commit>/<path>    links to blobs
//! ```

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::error::io;
use crate::name::is_plain;
use crate::select::{is_weights, matches};
use crate::{Name, Result};

const MODELS: &str = "models--";

/// The folder where models are kept.
#[derive(Clone, Debug)]
pub struct Cache {
    folder: PathBuf,
}

/// A repository that is there, in whole or in part.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Installed {
    /// `owner/repo`.
    pub repo: String,
    /// Its folder in the cache.
    pub folder: PathBuf,
    /// The snapshot that is used.
    pub snapshot: PathBuf,
    /// Bytes that it takes on the disk, with older snapshots.
    pub bytes: u64,
    /// Whether there are files that are not whole.
    pub incomplete: bool,
    /// Files of weights in the snapshot, relative to it.
    pub weights: Vec<String>,
    /// Whether it is a model in diffusers' layout.
    pub is_model: bool,
}

impl Cache {
    /// The cache in this folder, which need not exist.
    pub fn new(folder: impl Into<PathBuf>) -> Cache {
        Cache { folder: folder.into() }
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub(crate) fn repo(&self, repo: &str) -> PathBuf {
        self.folder.join(format!("{MODELS}{}", repo.replace('/', "--")))
    }

    /// All models in it, sorted by name.
    pub fn list(&self) -> Vec<Installed> {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let repo = |entry: fs::DirEntry| {
            let name = entry.file_name().into_string().ok()?;
            let (owner, repo) = name.strip_prefix(MODELS)?.split_once("--")?;
            (is_plain(owner) && is_plain(repo)).then(|| format!("{owner}/{repo}"))
        };
        let mut repos: Vec<String> = entries.filter_map(repo).collect();
        repos.sort();
        repos.iter().filter_map(|repo| self.installed(repo, "main")).collect()
    }

    /// What is there of a repository at a revision.
    pub fn installed(&self, repo: &str, revision: &str) -> Option<Installed> {
        let folder = self.repo(repo);
        let commit = fs::read_to_string(folder.join("refs").join(revision)).ok();
        let commit = commit.map_or_else(|| revision.to_owned(), |text| text.trim().to_owned());
        let snapshot = folder.join("snapshots").join(Some(commit).filter(|c| is_plain(c))?);
        let mut files = Vec::new();
        list_files(&snapshot, &snapshot, &mut files);
        let (mut bytes, mut incomplete) = (0, false);
        for entry in fs::read_dir(folder.join("blobs")).into_iter().flatten().flatten() {
            bytes += entry.metadata().map_or(0, |about| about.len());
            incomplete |= entry.path().extension().is_some_and(|e| e == "incomplete");
        }
        if files.is_empty() && bytes == 0 {
            return None;
        }
        Some(Installed {
            repo: repo.to_owned(),
            is_model: snapshot.join("model_index.json").is_file(),
            weights: files.into_iter().filter(|path| is_weights(path)).collect(),
            folder,
            snapshot,
            bytes,
            incomplete,
        })
    }

    /// The path that a name stands for: a model's folder, or the one file of weights that it means.
    pub fn find(&self, name: &Name) -> Result<Option<PathBuf>> {
        let Some(found) = self.installed(&name.repo, &name.revision) else { return Ok(None) };
        if found.is_model && name.pattern.is_none() {
            return Ok(Some(found.snapshot));
        }
        let fits = |path: &&String| name.pattern.as_ref().is_none_or(|pattern| matches(pattern, path));
        let fitting: Vec<&String> = found.weights.iter().filter(fits).collect();
        Ok(match fitting[..] {
            [one] => Some(found.snapshot.join(one)),
            _ => None,
        })
    }

    /// Removes a repository with all that was fetched of it. Gives the bytes that are free now.
    pub fn remove(&self, repo: &str) -> Result<u64> {
        let bytes = self.installed(repo, "main").map_or(0, |found| found.bytes);
        let folder = self.repo(repo);
        fs::remove_dir_all(&folder).map_err(io("remove", folder))?;
        Ok(bytes)
    }

    /// Removes the files of a repository that a pattern matches, and their blobs unless another file has them, too.
    pub fn remove_matching(&self, repo: &str, pattern: &str) -> Result<u64> {
        let folder = self.repo(repo);
        let (mut kept, mut gone) = (BTreeSet::new(), BTreeSet::new());
        for snapshot in fs::read_dir(folder.join("snapshots")).into_iter().flatten().flatten() {
            let mut files = Vec::new();
            list_files(&snapshot.path(), &snapshot.path(), &mut files);
            for file in files {
                let path = snapshot.path().join(&file);
                let blob = fs::canonicalize(&path).unwrap_or_else(|_| path.clone());
                if matches(pattern, &file) {
                    fs::remove_file(&path).map_err(io("remove", &path))?;
                    gone.insert(blob);
                } else {
                    kept.insert(blob);
                }
            }
        }
        let blobs = fs::canonicalize(folder.join("blobs")).unwrap_or_default();
        let mut bytes = 0;
        // Only what lies in the cache: a link may lead anywhere.
        for blob in gone.difference(&kept).filter(|blob| blob.parent() == Some(&blobs)) {
            bytes += fs::metadata(blob).map_or(0, |about| about.len());
            fs::remove_file(blob).map_err(io("remove", blob))?;
        }
        Ok(bytes)
    }

    /// Makes a blob a file of a snapshot.
    pub(crate) fn link(&self, repo: &str, commit: &str, path: &str, hash: &str) -> Result<()> {
        let file = self.repo(repo).join("snapshots").join(commit).join(path);
        let blob = self.repo(repo).join("blobs").join(hash);
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder).map_err(io("make", folder))?;
        }
        if file.exists() {
            return Ok(());
        }
        // A link that leads nowhere is in the way.
        let _ = fs::remove_file(&file);
        let up = "../".repeat(2 + path.split('/').count() - 1);
        let linked = symlink(&PathBuf::from(format!("{up}blobs/{hash}")), &file);
        // Where links need rights that users don't have, the same file under two names does; else a copy.
        let linked = linked.or_else(|_| fs::hard_link(&blob, &file));
        linked.or_else(|_| fs::copy(&blob, &file).map(drop)).map_err(io("write", &file))
    }

    /// Notes which commit a revision stands for.
    pub(crate) fn set_revision(&self, repo: &str, revision: &str, commit: &str) -> Result<()> {
        if revision == commit {
            return Ok(());
        }
        let file = self.repo(repo).join("refs").join(revision);
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder).map_err(io("make", folder))?;
        }
        fs::write(&file, commit).map_err(io("write", file))
    }
}

#[cfg(unix)]
fn symlink(to: &Path, at: &Path) -> std::io::Result<()> {
    std::os::unix::fs::symlink(to, at)
}

#[cfg(windows)]
fn symlink(to: &Path, at: &Path) -> std::io::Result<()> {
    std::os::windows::fs::symlink_file(to, at)
}

/// Files below `folder` that can be read, relative to `root`, sorted within each folder.
fn list_files(root: &Path, folder: &Path, out: &mut Vec<String>) {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
    paths.sort();
    for path in paths {
        // A link to a folder could lead round in a circle.
        if path.is_dir() && !path.is_symlink() {
            list_files(root, &path, out);
        } else if path.is_file()
            && let Ok(relative) = path.strip_prefix(root)
        {
            out.push(relative.to_string_lossy().replace('\\', "/"));
        }
    }
}
