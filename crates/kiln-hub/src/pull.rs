use std::fs;
use std::path::PathBuf;
use std::thread;

use crate::client::{Client, Listing};
use crate::download::Download;
use crate::error::io;
use crate::{Cache, Error, Name, Result, Settings, select};

/// How far a pull is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress<'a> {
    /// The file that is being fetched.
    pub file: &'a str,
    /// Its number, from 0.
    pub index: usize,
    /// How many there are.
    pub files: usize,
    /// Bytes that are there of all files.
    pub done: u64,
    /// Bytes of all files.
    pub total: u64,
}

/// What was pulled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pulled {
    /// The folder of the snapshot.
    pub snapshot: PathBuf,
    /// The commit.
    pub commit: String,
    /// Files that are there now.
    pub files: usize,
    /// Bytes of all of them.
    pub bytes: u64,
    /// Bytes that had to be fetched.
    pub fetched: u64,
}

/// Fetches what `name` stands for into the cache, as far as it is not there. `told` hears of the progress, and stops it by
/// returning false; what has come until then is kept for the next time.
pub fn pull(settings: &Settings, name: &Name, told: &mut dyn FnMut(Progress<'_>) -> bool) -> Result<Pulled> {
    let client = Client::new(settings);
    let cache = Cache::new(&settings.cache);
    let Listing { commit, files } = list(settings, &client, name)?;
    let files = select::select(name, files)?;
    let total = files.iter().map(|file| file.size).fold(0u64, u64::saturating_add);
    let blobs = cache.repo(&name.repo).join("blobs");
    fs::create_dir_all(&blobs).map_err(io("make", &blobs))?;
    let (mut before, mut fetched) = (0, 0);
    for (index, file) in files.iter().enumerate() {
        let mut tell = |done| {
            let progress =
                Progress { file: &file.path, index, files: files.len(), done: before + done, total };
            if told(progress) { Ok(()) } else { Err(Error::Cancelled) }
        };
        let blob = blobs.join(&file.hash);
        if blob.metadata().is_ok_and(|about| about.len() == file.size) {
            tell(file.size)?;
        } else {
            let (client, repo, commit) = (&client, name.repo.as_str(), commit.as_str());
            let mut first = None;
            Download { client, settings, repo, commit, file, blob }.run(&mut |done| {
                first.get_or_insert(done);
                tell(done)
            })?;
            fetched += file.size - first.unwrap_or(0).min(file.size);
        }
        cache.link(&name.repo, &commit, &file.path, &file.hash)?;
        before += file.size;
    }
    // Last: a revision that stands for a snapshot has all of what was asked for.
    cache.set_revision(&name.repo, &name.revision, &commit)?;
    let snapshot = cache.repo(&name.repo).join("snapshots").join(&commit);
    Ok(Pulled { snapshot, commit, files: files.len(), bytes: total, fetched })
}

/// The list of files, asked for again when the connection breaks.
fn list(settings: &Settings, client: &Client, name: &Name) -> Result<Listing> {
    let mut pause = settings.pause;
    for _ in 1..settings.attempts {
        match client.list(name) {
            Err(Error::Connection { .. }) => thread::sleep(pause),
            other => return other,
        }
        pause = pause.saturating_mul(2);
    }
    client.list(name)
}
