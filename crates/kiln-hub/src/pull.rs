//! Pulling: downloading all files of a model into the cache.

use std::fs;
use std::path::{Path, PathBuf};
use std::thread;

use crate::client::{Client, RemoteFile, RepoListing};
use crate::download::Download;
use crate::error::io;
use crate::{Cache, Error, HubSettings, ModelName, Result, select};

/// The progress of a pull.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PullProgress<'a> {
    /// The file being downloaded.
    pub file: &'a str,
    /// Its index.
    pub index: usize,
    /// Number of files.
    pub files: usize,
    /// Bytes present, of all files.
    pub done: u64,
    /// Total bytes of all files.
    pub total: u64,
}

/// The result of a pull.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullSummary {
    /// The folder of the snapshot.
    pub snapshot: PathBuf,
    /// The commit.
    pub commit: String,
    /// Number of files.
    pub files: usize,
    /// Their total size.
    pub bytes: u64,
    /// Bytes that were downloaded.
    pub downloaded: u64,
}

/// What a pull will download.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PullPlan {
    /// The repository, the revision and the pattern.
    pub name: ModelName,
    /// The commit of the revision.
    pub commit: String,
    /// The selected files.
    pub files: Vec<RemoteFile>,
    /// The licence that the repository states, such as `apache-2.0`.
    pub licence: Option<String>,
    /// Total bytes of the files.
    pub bytes: u64,
    /// Bytes that are not in the cache yet.
    pub missing: u64,
    /// The repository's folder in the cache.
    pub folder: PathBuf,
}

/// Lists and selects the files of `name`. Downloads nothing.
pub fn plan(settings: &HubSettings, name: &ModelName) -> Result<PullPlan> {
    let RepoListing { commit, files, licence } = list_with_retries(settings, &Client::new(settings), name)?;
    let files = select::select(name, files)?;
    let sum = |sizes: &mut dyn Iterator<Item = u64>| sizes.fold(0u64, u64::saturating_add);
    let folder = Cache::new(&settings.cache).repo(&name.repo);
    let missing = |file: &RemoteFile| {
        let blob = folder.join("blobs").join(&file.hash);
        let size = |path: &Path| path.metadata().map_or(0, |metadata| metadata.len());
        let present = size(&blob).max(size(&blob.with_extension("incomplete")));
        file.size.saturating_sub(present)
    };
    let bytes = sum(&mut files.iter().map(|file| file.size));
    let missing = sum(&mut files.iter().map(missing));
    Ok(PullPlan { name: name.clone(), commit, files, licence, bytes, missing, folder })
}

/// Downloads the files of `name` that are not in the cache yet.
///
/// `on_progress` cancels the pull by returning false; what is downloaded by then is kept for the next pull.
pub fn pull(
    settings: &HubSettings,
    name: &ModelName,
    on_progress: &mut dyn FnMut(PullProgress<'_>) -> bool,
) -> Result<PullSummary> {
    plan(settings, name)?.run(settings, on_progress)
}

impl PullPlan {
    /// Downloads the files that are not in the cache yet, as [`pull`] does.
    pub fn run(
        &self,
        settings: &HubSettings,
        on_progress: &mut dyn FnMut(PullProgress<'_>) -> bool,
    ) -> Result<PullSummary> {
        let PullPlan { name, commit, files, bytes: total, .. } = self;
        let client = Client::new(settings);
        let cache = Cache::new(&settings.cache);
        let blobs = cache.repo(&name.repo).join("blobs");
        fs::create_dir_all(&blobs).map_err(io("create", &blobs))?;
        if let Some(free) = kiln_base::free_space(&blobs).filter(|free| *free < self.missing) {
            return Err(Error::NoSpace { folder: blobs, needed: self.missing, free });
        }
        let (mut done_before, mut downloaded) = (0, 0);
        for (index, file) in files.iter().enumerate() {
            let mut report = |done| {
                let (files, done, total) = (files.len(), done_before + done, *total);
                let progress = PullProgress { file: &file.path, index, files, done, total };
                if on_progress(progress) { Ok(()) } else { Err(Error::Cancelled) }
            };
            let blob = blobs.join(&file.hash);
            if blob.metadata().is_ok_and(|metadata| metadata.len() == file.size) {
                report(file.size)?;
            } else {
                let (client, repo) = (&client, name.repo.as_str());
                let mut resumed_from = None;
                Download { client, settings, repo, commit, file, blob }.run(&mut |done| {
                    resumed_from.get_or_insert(done);
                    report(done)
                })?;
                downloaded += file.size - resumed_from.unwrap_or(0).min(file.size);
            }
            cache.link(&name.repo, commit, &file.path, &file.hash)?;
            done_before += file.size;
        }
        // Last, so that a revision never points to an incomplete snapshot.
        cache.set_revision(&name.repo, &name.revision, commit)?;
        let snapshot = cache.repo(&name.repo).join("snapshots").join(commit);
        Ok(PullSummary { snapshot, commit: commit.clone(), files: files.len(), bytes: *total, downloaded })
    }
}

/// Lists the files, retrying on connection errors.
fn list_with_retries(settings: &HubSettings, client: &Client, name: &ModelName) -> Result<RepoListing> {
    let mut backoff = settings.backoff;
    for _ in 1..settings.attempts {
        match client.list(name) {
            Err(Error::Connection { .. }) => thread::sleep(backoff),
            other => return other,
        }
        backoff = backoff.saturating_mul(2);
    }
    client.list(name)
}
