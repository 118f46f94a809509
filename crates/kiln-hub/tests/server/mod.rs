//! A hub in small: speaks as much of the protocol as programs need, and misbehaves on demand.
#![allow(dead_code, reason = "every test file uses its own part of this")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A file that the hub has: what it says of it, and what it sends.
#[derive(Clone)]
pub struct Served {
    pub bytes: Vec<u8>,
    /// SHA-256 for files kept apart, git's SHA-1 for others.
    pub hash: String,
    pub large: bool,
}

/// How the hub behaves.
#[derive(Clone, Default)]
pub struct Manners {
    /// Connections that end after so many bytes of a file's body, one after the other.
    pub drop_after: Vec<usize>,
    /// Ignores what part of a file is asked for.
    pub no_ranges: bool,
    /// Answers every question for a part with another part.
    pub wrong_range: bool,
    /// Answers so often with this status before all goes well.
    pub busy: (usize, u16),
    /// Status for everything that comes without this token, and what the header says.
    pub gate: Option<(String, u16, &'static str)>,
    /// Files are at another host, as with the real one.
    pub redirect: bool,
    /// Instead of the list of files.
    pub list: Option<String>,
    /// Sends this many bytes more than a file has.
    pub surplus: usize,
}

/// A request as it came.
#[derive(Clone, Debug)]
pub struct Asked {
    pub path: String,
    pub headers: BTreeMap<String, String>,
}

#[derive(Clone)]
pub struct Hub {
    port: u16,
    repo: String,
    files: Arc<Vec<(String, Served)>>,
    pub manners: Arc<Mutex<Manners>>,
    pub asked: Arc<Mutex<Vec<Asked>>>,
}

impl Hub {
    /// A hub with one repository, which runs until the test ends.
    pub fn start(repo: &str, files: Vec<(String, Served)>, manners: Manners) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let hub = Hub {
            port: listener.local_addr().unwrap().port(),
            repo: repo.into(),
            files: Arc::new(files),
            manners: Arc::new(Mutex::new(manners)),
            asked: Arc::default(),
        };
        let serving = hub.clone();
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let hub = serving.clone();
                thread::spawn(move || hub.serve(stream));
            }
        });
        hub
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// How often a file was asked for.
    pub fn times(&self, part: &str) -> usize {
        self.asked.lock().unwrap().iter().filter(|asked| asked.path.contains(part)).count()
    }

    fn serve(&self, mut stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
        let Some(path) = lines.next().and_then(|l| Some(l.split(' ').nth(1)?.to_owned())) else { return };
        let split = |line: String| line.split_once(": ").map(|(k, v)| (k.to_lowercase(), v.to_owned()));
        let headers: BTreeMap<_, _> = lines.take_while(|line| !line.is_empty()).filter_map(split).collect();
        let asked = Asked { path, headers };
        self.asked.lock().unwrap().push(asked.clone());
        let _ = self.answer(&mut stream, &asked);
    }

    fn answer(&self, stream: &mut TcpStream, asked: &Asked) -> std::io::Result<()> {
        let mut manners = self.manners.lock().unwrap().clone();
        if manners.busy.0 > 0 {
            self.manners.lock().unwrap().busy.0 -= 1;
            return send(stream, manners.busy.1, "", b"busy");
        }
        let from_cdn = asked.path.starts_with("/cdn/");
        if let Some((token, status, code)) = &manners.gate
            && !from_cdn
            && asked.headers.get("authorization") != Some(&format!("Bearer {token}"))
        {
            return send(stream, *status, &format!("X-Error-Code: {code}\r\n"), b"no");
        }
        if asked.path == format!("/api/models/{}/revision/main?blobs=true", self.repo) {
            let list = manners.list.take().unwrap_or_else(|| self.list());
            return send(stream, 200, "", list.as_bytes());
        }
        let resolve = format!("/{}/resolve/{COMMIT}/", self.repo);
        let name = asked.path.strip_prefix(&resolve).or(asked.path.strip_prefix("/cdn/"));
        let file = name.and_then(|name| self.files.iter().find(|(path, _)| path.replace(' ', "%20") == name));
        let Some((name, file)) = file else {
            return send(stream, 404, "X-Error-Code: EntryNotFound\r\n", b"none");
        };
        if manners.redirect && !from_cdn {
            // The same machine under another name: a host that must not see the token.
            let to = format!("Location: http://localhost:{}/cdn/{}\r\n", self.port, name.replace(' ', "%20"));
            return send(stream, 302, &to, b"");
        }
        self.send_file(stream, asked, &file.bytes)
    }

    fn send_file(&self, stream: &mut TcpStream, asked: &Asked, bytes: &[u8]) -> std::io::Result<()> {
        let (no_ranges, wrong_range, surplus, drop) = {
            let mut manners = self.manners.lock().unwrap();
            let drop = if manners.drop_after.is_empty() { None } else { Some(manners.drop_after.remove(0)) };
            (manners.no_ranges, manners.wrong_range, manners.surplus, drop)
        };
        let from = asked
            .headers
            .get("range")
            .and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
        let from: usize = from.filter(|_| !no_ranges).unwrap_or(0);
        if from > bytes.len() {
            return send(stream, 416, "", b"");
        }
        let mut body = bytes[from..].to_vec();
        body.extend(vec![0; surplus]);
        let told = if wrong_range { 0 } else { from };
        let (status, range) = match from {
            0 => (200, String::new()),
            _ => (206, format!("Content-Range: bytes {told}-{}/{}\r\n", bytes.len() - 1, bytes.len())),
        };
        let head = head(status, &range, body.len());
        stream.write_all(head.as_bytes())?;
        stream.write_all(&body[..drop.unwrap_or(body.len()).min(body.len())])?;
        stream.flush()
    }

    /// What the hub says of its files.
    pub fn list(&self) -> String {
        let entry = |(path, file): &(String, Served)| {
            let size = file.bytes.len();
            match file.large {
                true => format!(
                    r#"{{"rfilename":"{path}","blobId":"{COMMIT}","size":{size},"lfs":{{"sha256":"{}","size":{size},"pointerSize":1}}}}"#,
                    file.hash
                ),
                false => format!(r#"{{"rfilename":"{path}","size":{size},"blobId":"{}"}}"#, file.hash),
            }
        };
        let entries: Vec<_> = self.files.iter().map(entry).collect();
        format!(r#"{{"id":"{}","sha":"{COMMIT}","siblings":[{}]}}"#, self.repo, entries.join(","))
    }
}

fn head(status: u16, headers: &str, length: usize) -> String {
    format!("HTTP/1.1 {status} X\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n")
}

fn send(stream: &mut TcpStream, status: u16, headers: &str, body: &[u8]) -> std::io::Result<()> {
    stream.write_all(head(status, headers, body.len()).as_bytes())?;
    stream.write_all(body)?;
    stream.flush()
}
