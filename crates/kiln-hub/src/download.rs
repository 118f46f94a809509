//! One file: what is there of it already, the rest from the hub, and whether the whole is right.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::thread;

use sha1::Sha1;
use sha2::{Digest, Sha256};

use crate::client::{Client, RemoteFile};
use crate::error::io;
use crate::{Error, Result, Settings};

/// Bytes read at a time.
const CHUNK: usize = 256 << 10;

/// A file that is fetched into the cache.
pub(crate) struct Download<'a> {
    pub client: &'a Client,
    pub settings: &'a Settings,
    pub repo: &'a str,
    pub commit: &'a str,
    pub file: &'a RemoteFile,
    /// Where it goes when it is whole.
    pub blob: PathBuf,
}

/// What came of one connection.
enum Came {
    All,
    /// It broke after so many bytes.
    Some(u64, String),
}

impl Download<'_> {
    /// Fetches the file. `told` hears how much of it there is, and may stop it.
    pub fn run(&self, told: &mut dyn FnMut(u64) -> Result<()>) -> Result<()> {
        // The name that the other programs give to a file that is not whole.
        let part = self.blob.with_extension("incomplete");
        let mut open = OpenOptions::new();
        let mut out = open
            .create(true)
            .read(true)
            .write(true)
            .truncate(false)
            .open(&part)
            .map_err(io("write", &part))?;
        match out.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => return Err(Error::Busy { file: part }),
            // Some network drives know no locks.
            Err(TryLockError::Error(_)) => {}
        }
        let mut hash = Hash::of(self.file);
        let mut have = self.take_up(&mut out, &part, &mut hash)?;
        told(have)?;
        let mut left = self.settings.attempts;
        let mut pause = self.settings.pause;
        while have < self.file.size {
            let came = match self.connect(&mut out, &part, &mut hash, &mut have, told) {
                Err(Error::Connection { reason, .. }) => Came::Some(0, reason),
                other => other?,
            };
            if let Came::Some(bytes, reason) = came {
                // A line that breaks now and then gets there in the end; one that brings nothing does not.
                if bytes > 0 {
                    (left, pause) = (self.settings.attempts, self.settings.pause);
                }
                left = left.saturating_sub(1);
                if left == 0 {
                    let url = format!("{}/{}", self.repo, self.file.path);
                    return Err(Error::Connection { url, reason });
                }
                thread::sleep(pause);
                pause = pause.saturating_mul(2);
                told(have)?;
            }
        }
        out.sync_all().map_err(io("write", &part))?;
        let found = hash.finish();
        if found != self.file.hash {
            // Nothing of it can be trusted.
            let _ = fs::remove_file(&part);
            let (repo, file) = (self.repo.to_owned(), self.file.path.clone());
            return Err(Error::Checksum { repo, file, expected: self.file.hash.clone(), found });
        }
        fs::rename(&part, &self.blob).map_err(io("write", &self.blob))
    }

    /// Reads what an earlier run has left.
    fn take_up(&self, out: &mut File, part: &Path, hash: &mut Hash) -> Result<u64> {
        let mut buffer = vec![0; CHUNK];
        let mut have = 0u64;
        loop {
            let count = out.read(&mut buffer).map_err(io("read", part))?;
            if count == 0 {
                return Ok(have);
            }
            have += count as u64;
            if have > self.file.size {
                return self.start_again(out, part, hash);
            }
            hash.update(&buffer[..count]);
        }
    }

    fn start_again(&self, out: &mut File, part: &Path, hash: &mut Hash) -> Result<u64> {
        out.set_len(0).and_then(|()| io::Seek::rewind(out)).map_err(io("write", part))?;
        *hash = Hash::of(self.file);
        Ok(0)
    }

    /// One connection: takes what it gives.
    fn connect(
        &self,
        out: &mut File,
        part: &Path,
        hash: &mut Hash,
        have: &mut u64,
        told: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<Came> {
        let (url, mut answer) = self.client.file(self.repo, self.commit, &self.file.path, *have)?;
        let start = format!("bytes {have}-");
        let range = answer.headers().get("content-range").and_then(|v| v.to_str().ok()).unwrap_or_default();
        let goes_on = answer.status() == 206 && range.starts_with(&start);
        if *have > 0 && !goes_on {
            *have = self.start_again(out, part, hash)?;
            // Of an answer that is neither the rest nor the whole, nothing is taken.
            if answer.status() != 200 {
                return Ok(Came::Some(0, format!("the hub answered {} with `{range}`", answer.status())));
            }
        } else if *have == 0 && answer.status() != 200 {
            return Ok(Came::Some(0, format!("the hub answered {}", answer.status())));
        }
        let mut body = answer.body_mut().with_config().limit(u64::MAX).reader();
        let mut buffer = vec![0; CHUNK];
        let before = *have;
        loop {
            let count = match body.read(&mut buffer) {
                Ok(count) => count,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) => return Ok(Came::Some(*have - before, e.to_string())),
            };
            if count == 0 {
                break;
            }
            if *have + count as u64 > self.file.size {
                let what = format!("more than the {} bytes that the file has", self.file.size);
                return Err(Error::Answer { what, url });
            }
            out.write_all(&buffer[..count]).map_err(io("write", part))?;
            hash.update(&buffer[..count]);
            *have += count as u64;
            told(*have)?;
        }
        match *have == self.file.size {
            true => Ok(Came::All),
            false => Ok(Came::Some(*have - before, "the connection ended too early".into())),
        }
    }
}

/// The checksum that a file is named after: SHA-256, or git's own of short files, which has a line before the contents.
enum Hash {
    Sha256(Sha256),
    Git(Sha1),
}

impl Hash {
    fn of(file: &RemoteFile) -> Hash {
        match file.hash.len() {
            64 => Hash::Sha256(Sha256::new()),
            _ => Hash::Git(Sha1::new_with_prefix(format!("blob {}\0", file.size))),
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Hash::Sha256(hash) => hash.update(bytes),
            Hash::Git(hash) => hash.update(bytes),
        }
    }

    fn finish(self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        match self {
            Hash::Sha256(hash) => hex(&hash.finalize()),
            Hash::Git(hash) => hex(&hash.finalize()),
        }
    }
}
