//! Pulling: downloading all files of a model into the cache, with those of other repositories that it needs.

use std::fs;
use std::path::PathBuf;
use std::thread;

use crate::client::{Client, RepoListing};
use crate::download::Download;
use crate::error::io;
use crate::remote_file::RemoteFile;
use kiln_family::Licence;

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
    /// The terms that the user must accept, if there are any.
    pub terms: Option<Terms>,
    /// Total bytes of the files.
    pub bytes: u64,
    /// Bytes that are not in the cache yet.
    pub missing: u64,
    /// The repository's folder in the cache.
    pub folder: PathBuf,
}

/// A licence that must be accepted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// Its name.
    pub licence: String,
    /// Where to read it.
    pub url: String,
}

impl Terms {
    /// The terms of a repository: those of a known model, or what its page says.
    fn of(name: &ModelName, listing: &RepoListing, endpoint: &str) -> Option<Terms> {
        if let Some(Licence { name, url }) = name.licence() {
            return Some(Terms { licence: name.into(), url: url.into() });
        }
        let licence = listing.licence.clone().unwrap_or_else(|| "licence without a name".into());
        let has_conditions = licence.to_ascii_lowercase().contains("non-commercial")
            || licence.to_ascii_lowercase().starts_with("cc-by-nc");
        let page = || format!("{endpoint}/{}", name.repo);
        let url = listing.licence_url.clone().unwrap_or_else(page);
        (listing.gated || has_conditions).then_some(Terms { licence, url })
    }
}

/// What pulling a model will download: its own files, and those that complete it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelPlan {
    /// The model's own files.
    pub model: PullPlan,
    /// The files of other repositories, or other files of its own, that it needs.
    pub companions: Vec<PullPlan>,
}

/// Lists and selects the files of `name`, and those of its companions that the cache has nothing in place of. Downloads
/// nothing.
pub fn plan_model(settings: &HubSettings, name: &ModelName) -> Result<ModelPlan> {
    let model = plan(settings, name)?;
    let companions = Cache::new(&settings.cache).companions_to_pull(name);
    let companions = companions.iter().map(|companion| plan(settings, companion)).collect::<Result<_>>()?;
    Ok(ModelPlan { model, companions })
}

impl ModelPlan {
    /// The plans, the model's own first.
    pub fn all(&self) -> impl Iterator<Item = &PullPlan> {
        std::iter::once(&self.model).chain(&self.companions)
    }

    /// Total bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.all().map(|plan| plan.bytes).fold(0, u64::saturating_add)
    }

    /// Bytes that are not in the cache yet.
    pub fn missing(&self) -> u64 {
        self.all().map(|plan| plan.missing).fold(0, u64::saturating_add)
    }

    /// The terms of what is not in the cache yet, each once.
    pub fn terms(&self) -> Vec<&Terms> {
        let missing = self.all().filter(|plan| plan.missing > 0);
        let mut terms: Vec<&Terms> = Vec::new();
        for new in missing.filter_map(|plan| plan.terms.as_ref()) {
            if !terms.contains(&new) {
                terms.push(new);
            }
        }
        terms
    }

    /// Downloads the files that are not in the cache yet, as [`pull`] does. The progress and the summary are those of all
    /// files; the folder is the model's.
    pub fn run(
        &self,
        settings: &HubSettings,
        on_progress: &mut dyn FnMut(PullProgress<'_>) -> bool,
    ) -> Result<PullSummary> {
        let (files, total) = (self.all().map(|plan| plan.files.len()).sum(), self.bytes());
        let (mut files_before, mut bytes_before) = (0, 0);
        let mut run = |plan: &PullPlan| {
            let pulled = plan.run(settings, &mut |PullProgress { file, index, done, .. }| {
                let (index, done) = (files_before + index, bytes_before + done);
                on_progress(PullProgress { file, index, files, done, total })
            })?;
            files_before += plan.files.len();
            bytes_before += plan.bytes;
            Ok::<_, Error>(pulled)
        };
        let mut summary = PullSummary { files, bytes: total, ..run(&self.model)? };
        for companion in &self.companions {
            summary.downloaded += run(companion)?.downloaded;
        }
        Ok(summary)
    }
}

/// Lists and selects the files of `name`. Downloads nothing.
pub fn plan(settings: &HubSettings, name: &ModelName) -> Result<PullPlan> {
    let listing = list_with_retries(settings, &Client::new(settings), name)?;
    let terms = Terms::of(name, &listing, &settings.endpoint);
    let RepoListing { commit, files, licence, .. } = listing;
    let files = select::select(name, files)?;
    let sum = |sizes: &mut dyn Iterator<Item = u64>| sizes.fold(0u64, u64::saturating_add);
    let cache = Cache::new(&settings.cache);
    let folder = cache.repo(&name.repo);
    let missing = |file: &RemoteFile| file.size.saturating_sub(cache.downloaded(&name.repo, &commit, file));
    let bytes = sum(&mut files.iter().map(|file| file.size));
    let missing = sum(&mut files.iter().map(missing));
    Ok(PullPlan { name: name.clone(), commit, files, licence, terms, bytes, missing, folder })
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
            if cache.is_in_snapshot(&name.repo, commit, file) {
                report(file.size)?;
                done_before += file.size;
                continue;
            }
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
