//! Downloading one file: resuming a partial download, retrying, and verifying the checksum.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::client::Client;
use crate::error::io;
use crate::remote_file::RemoteFile;
use crate::{Error, HubSettings, Result};

/// Bytes read at a time.
const CHUNK: usize = 256 << 10;
/// A connection that delivers fewer bytes than this in the time limit counts as stalled.
const MIN_PROGRESS: u64 = 16 << 10;

/// The download of one file into the cache.
pub(crate) struct Download<'a> {
    pub client: &'a Client,
    pub settings: &'a HubSettings,
    pub repo: &'a str,
    pub commit: &'a str,
    pub file: &'a RemoteFile,
    /// Its final path.
    pub blob: PathBuf,
}

/// The outcome of one connection.
enum Attempt {
    Complete,
    Broken { received: u64, reason: String },
}

impl Download<'_> {
    /// Downloads the file. `on_progress` gets the bytes present, and may cancel with an error.
    pub fn run(&self, on_progress: &mut dyn FnMut(u64) -> Result<()>) -> Result<()> {
        // The name that Hugging Face's programs use for partial downloads.
        let partial = self.blob.with_extension("incomplete");
        let mut open = OpenOptions::new();
        let mut out = open
            .create(true)
            .read(true)
            .write(true)
            .truncate(false)
            .open(&partial)
            .map_err(io("write", &partial))?;
        match out.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(Error::InProgress { file: partial }),
            // Some network drives have no locks.
            Err(TryLockError::Error(_)) => {}
        }
        let mut checksum = Checksum::new(self.file);
        let mut have = self.resume(&mut out, &partial, &mut checksum)?;
        on_progress(have)?;
        let mut attempts_left = self.settings.attempts;
        let mut backoff = self.settings.backoff;
        while have < self.file.size {
            let attempt = match self.connect(&mut out, &partial, &mut checksum, &mut have, on_progress) {
                Err(Error::Connection { reason, .. }) => Attempt::Broken { received: 0, reason },
                other => other?,
            };
            if let Attempt::Broken { received, reason } = attempt {
                // Only attempts without progress count: an unstable connection still completes the download.
                if received > 0 {
                    (attempts_left, backoff) = (self.settings.attempts, self.settings.backoff);
                }
                attempts_left = attempts_left.saturating_sub(1);
                if attempts_left == 0 {
                    let url = format!("{}/{}", self.repo, self.file.path);
                    return Err(Error::Connection { url, reason });
                }
                thread::sleep(backoff);
                backoff = backoff.saturating_mul(2);
                on_progress(have)?;
            }
        }
        out.sync_all().map_err(io("write", &partial))?;
        let found = checksum.finish();
        if found != self.file.hash {
            // None of it can be trusted, so the next attempt must not resume it.
            let _ = fs::remove_file(&partial);
            let (repo, file) = (self.repo.to_owned(), self.file.path.clone());
            return Err(Error::Checksum { repo, file, expected: self.file.hash.clone(), found });
        }
        kiln_base::rename(&partial, &self.blob).map_err(io("write", &self.blob))
    }

    /// Reads the partial download of an earlier run. Returns its size.
    fn resume(&self, out: &mut File, partial: &Path, checksum: &mut Checksum) -> Result<u64> {
        let mut buffer = vec![0; CHUNK];
        let mut have = 0u64;
        loop {
            let count = out.read(&mut buffer).map_err(io("read", partial))?;
            if count == 0 {
                return Ok(have);
            }
            have += count as u64;
            if have > self.file.size {
                return self.restart(out, partial, checksum);
            }
            checksum.update(&buffer[..count]);
        }
    }

    fn restart(&self, out: &mut File, partial: &Path, checksum: &mut Checksum) -> Result<u64> {
        out.set_len(0).and_then(|()| io::Seek::rewind(out)).map_err(io("write", partial))?;
        *checksum = Checksum::new(self.file);
        Ok(0)
    }

    /// Downloads as much as one connection delivers.
    fn connect(
        &self,
        out: &mut File,
        partial: &Path,
        checksum: &mut Checksum,
        have: &mut u64,
        on_progress: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<Attempt> {
        let (url, mut response) = self.client.download(self.repo, self.commit, &self.file.path, *have)?;
        let start = format!("bytes {have}-");
        let range = response.headers().get("content-range").and_then(|v| v.to_str().ok()).unwrap_or_default();
        let continues = response.status() == 206 && range.starts_with(&start);
        if *have > 0 && !continues {
            *have = self.restart(out, partial, checksum)?;
            // Neither the rest nor the whole file: ignore it.
            if response.status() != 200 {
                let reason = format!("the hub answered {} with `{range}`", response.status());
                return Ok(Attempt::Broken { received: 0, reason });
            }
        } else if *have == 0 && response.status() != 200 {
            let reason = format!("the hub answered {}", response.status());
            return Ok(Attempt::Broken { received: 0, reason });
        }
        let mut body = response.body_mut().with_config().limit(u64::MAX).reader();
        let mut buffer = vec![0; CHUNK];
        let before = *have;
        let mut progress = ProgressWindow::new(before, self.settings.timeout);
        loop {
            let count = match body.read(&mut buffer) {
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => {
                    let error = ureq::Error::from(e);
                    // After a time without data, a few bytes before it don't count as progress.
                    let min = if matches!(error, ureq::Error::Timeout(_)) { MIN_PROGRESS } else { 1 };
                    let received = Some(*have - before).filter(|received| *received >= min).unwrap_or(0);
                    return Ok(Attempt::Broken { received, reason: error.to_string() });
                }
            };
            if count == 0 {
                break;
            }
            if *have + count as u64 > self.file.size {
                let what = format!("more than the {} bytes of the file", self.file.size);
                return Err(Error::BadResponse { what, url });
            }
            out.write_all(&buffer[..count]).map_err(io("write", partial))?;
            checksum.update(&buffer[..count]);
            *have += count as u64;
            on_progress(*have)?;
            if progress.has_stalled(*have) && *have < self.file.size {
                let seconds = self.settings.timeout.as_secs_f64();
                let reason = format!("it stalled: fewer than {MIN_PROGRESS} bytes in {seconds} s");
                return Ok(Attempt::Broken { received: 0, reason });
            }
        }
        if *have == self.file.size {
            Ok(Attempt::Complete)
        } else {
            let reason = "the connection ended too early".into();
            Ok(Attempt::Broken { received: *have - before, reason })
        }
    }
}

/// Notices a connection that trickles: no single read times out, and the download would never end.
struct ProgressWindow {
    start: Instant,
    at_start: u64,
    length: Duration,
}

impl ProgressWindow {
    fn new(have: u64, length: Duration) -> ProgressWindow {
        ProgressWindow { start: Instant::now(), at_start: have, length }
    }

    /// Returns whether a whole window passed with hardly any progress.
    fn has_stalled(&mut self, have: u64) -> bool {
        if self.start.elapsed() < self.length {
            return false;
        }
        let stalled = have - self.at_start < MIN_PROGRESS;
        *self = ProgressWindow::new(have, self.length);
        stalled
    }
}

/// The checksum of a file: SHA-256 for LFS files, otherwise git's SHA-1, which covers a header before the contents.
enum Checksum {
    Sha256(Sha256),
    Git(Sha1),
}

impl Checksum {
    fn new(file: &RemoteFile) -> Checksum {
        match file.hash.len() {
            64 => Checksum::Sha256(Sha256::new()),
            _ => Checksum::Git(Sha1::new_with_prefix(format!("blob {}\0", file.size))),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Checksum::Sha256(hash) => hash.update(bytes),
            Checksum::Git(hash) => hash.update(bytes),
        }
    }

    fn finish(self) -> String {
        match self {
            Checksum::Sha256(hash) => kiln_base::hex(hash.finalize()),
            Checksum::Git(hash) => kiln_base::hex(hash.finalize()),
        }
    }
}
