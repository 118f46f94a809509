//! A test server with the parts of the hub's API that Kiln uses, which fails on demand.
#![allow(dead_code, reason = "shared by several test binaries, none of which uses everything")]

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A file of the hub: its listed checksum and its contents.
#[derive(Clone)]
pub struct HubFile {
    pub bytes: Vec<u8>,
    /// SHA-256 of LFS files, git's SHA-1 of others.
    pub hash: String,
    pub large: bool,
}

/// How the hub fails; by default not at all.
#[derive(Clone, Default)]
pub struct HubBehavior {
    /// Successive connections end after this many bytes of the body.
    pub drop_after: Vec<usize>,
    /// Ignores `Range` headers.
    pub no_ranges: bool,
    /// Answers `Range` requests with another range.
    pub wrong_range: bool,
    /// Answers this many requests with this status first.
    pub busy: (usize, u16),
    /// Required token, and the status and `X-Error-Code` of requests without it.
    pub gate: Option<(String, u16, &'static str)>,
    /// Redirects downloads to another host, as the real hub does.
    pub redirect: bool,
    /// A path below which everything is, as on some mirrors. Redirects are then relative.
    pub prefix: &'static str,
    /// Replaces the list of files.
    pub list: Option<String>,
    /// Sends this many bytes of a file's rest and then nothing, without closing the connection.
    pub stall_after: Option<usize>,
    /// Sends this many extra bytes after a file.
    pub surplus: usize,
}

/// A received request.
#[derive(Clone, Debug)]
pub struct Request {
    pub path: String,
    pub headers: BTreeMap<String, String>,
}

/// The name of a repository, and its files.
pub type Repo = (String, Vec<(String, HubFile)>);

#[derive(Clone)]
pub struct Hub {
    port: u16,
    repos: Arc<Vec<Repo>>,
    pub behavior: Arc<Mutex<HubBehavior>>,
    pub requests: Arc<Mutex<Vec<Request>>>,
}

impl Hub {
    /// Starts a hub with one repository, which runs until the test ends.
    pub fn start(repo: &str, files: Vec<(String, HubFile)>, behavior: HubBehavior) -> Hub {
        Hub::start_all(vec![(repo.into(), files)], behavior)
    }

    /// Starts a hub with several repositories.
    pub fn start_all(repos: Vec<Repo>, behavior: HubBehavior) -> Hub {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let hub = Hub {
            port: listener.local_addr().unwrap().port(),
            repos: Arc::new(repos),
            behavior: Arc::new(Mutex::new(behavior)),
            requests: Arc::default(),
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
        format!("http://127.0.0.1:{}{}", self.port, self.behavior.lock().unwrap().prefix)
    }

    fn serve(&self, mut stream: TcpStream) {
        let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map_while(Result::ok);
        let Some(path) = lines.next().and_then(|l| Some(l.split(' ').nth(1)?.to_owned())) else { return };
        let split = |line: String| line.split_once(": ").map(|(k, v)| (k.to_lowercase(), v.to_owned()));
        let headers: BTreeMap<_, _> = lines.take_while(|line| !line.is_empty()).filter_map(split).collect();
        let prefix = self.behavior.lock().unwrap().prefix;
        let path = path.strip_prefix(prefix).unwrap_or("/outside").to_owned();
        let request = Request { path, headers };
        self.requests.lock().unwrap().push(request.clone());
        let _ = self.answer(&mut stream, &request);
    }

    fn answer(&self, stream: &mut TcpStream, request: &Request) -> std::io::Result<()> {
        let mut behavior = self.behavior.lock().unwrap().clone();
        if behavior.busy.0 > 0 {
            self.behavior.lock().unwrap().busy.0 -= 1;
            return send(stream, behavior.busy.1, "", b"busy");
        }
        let from_cdn = request.path.starts_with("/cdn/");
        if let Some((token, status, code)) = &behavior.gate
            && !from_cdn
            && request.headers.get("authorization") != Some(&format!("Bearer {token}"))
        {
            return send(stream, *status, &format!("X-Error-Code: {code}\r\n"), b"no");
        }
        for repo in &*self.repos {
            let api = format!("/api/models/{}/revision", repo.0);
            if [format!("{api}/main?blobs=true"), format!("{api}/{COMMIT}?blobs=true")]
                .contains(&request.path)
            {
                let list = behavior.list.take().unwrap_or_else(|| list(repo));
                return send(stream, 200, "", list.as_bytes());
            }
        }
        let file = self.repos.iter().find_map(|(repo, files)| {
            let resolve = format!("/{repo}/resolve/{COMMIT}/");
            let name = request.path.strip_prefix(&resolve).or(request.path.strip_prefix("/cdn/"))?;
            files.iter().find(|(path, _)| path.replace(' ', "%20") == name)
        });
        let Some((name, file)) = file else {
            return send(stream, 404, "X-Error-Code: EntryNotFound\r\n", b"none");
        };
        if behavior.redirect && !from_cdn {
            // The same machine by another name: a host that must not get the token.
            let host = match behavior.prefix {
                "" => format!("http://localhost:{}", self.port),
                prefix => prefix.to_owned(),
            };
            let to = format!("Location: {host}/cdn/{}\r\n", name.replace(' ', "%20"));
            return send(stream, 302, &to, b"");
        }
        self.send_file(stream, request, &file.bytes)
    }

    fn send_file(&self, stream: &mut TcpStream, request: &Request, bytes: &[u8]) -> std::io::Result<()> {
        let (no_ranges, wrong_range, surplus, drop) = {
            let mut behavior = self.behavior.lock().unwrap();
            let drop =
                if behavior.drop_after.is_empty() { None } else { Some(behavior.drop_after.remove(0)) };
            (behavior.no_ranges, behavior.wrong_range, behavior.surplus, drop)
        };
        let from = request
            .headers
            .get("range")
            .and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok());
        let from: usize = from.filter(|_| !no_ranges).unwrap_or(0);
        if from > bytes.len() {
            return send(stream, 416, "", b"");
        }
        let mut body = bytes[from..].to_vec();
        body.extend(vec![0; surplus]);
        let start = if wrong_range { 0 } else { from };
        let (status, range) = match from {
            0 => (200, String::new()),
            _ => (206, format!("Content-Range: bytes {start}-{}/{}\r\n", bytes.len() - 1, bytes.len())),
        };
        let head = head(status, &range, body.len());
        stream.write_all(head.as_bytes())?;
        let stall = self.behavior.lock().unwrap().stall_after;
        stream.write_all(&body[..drop.or(stall).unwrap_or(body.len()).min(body.len())])?;
        stream.flush()?;
        while stall.is_some_and(|sent| sent < body.len()) {
            // Until the test ends.
            thread::park();
        }
        Ok(())
    }

    /// The list of the first repository's files, as JSON.
    pub fn list(&self) -> String {
        list(&self.repos[0])
    }
}

/// The list of a repository's files, as JSON.
fn list((repo, files): &Repo) -> String {
    let entry = |(path, file): &(String, HubFile)| {
        let size = file.bytes.len();
        if file.large {
            format!(
                r#"{{"rfilename":"{path}","blobId":"{COMMIT}","size":{size},"lfs":{{"sha256":"{}","size":{size},"pointerSize":1}}}}"#,
                file.hash
            )
        } else {
            format!(r#"{{"rfilename":"{path}","size":{size},"blobId":"{}"}}"#, file.hash)
        }
    };
    let entries: Vec<_> = files.iter().map(entry).collect();
    let siblings = entries.join(",");
    format!(
        r#"{{"id":"{repo}","sha":"{COMMIT}","cardData":{{"license":"apache-2.0"}},"siblings":[{siblings}]}}"#
    )
}

fn head(status: u16, headers: &str, length: usize) -> String {
    format!("HTTP/1.1 {status} X\r\n{headers}Content-Length: {length}\r\nConnection: close\r\n\r\n")
}

fn send(stream: &mut TcpStream, status: u16, headers: &str, body: &[u8]) -> std::io::Result<()> {
    stream.write_all(head(status, headers, body.len()).as_bytes())?;
    stream.write_all(body)?;
    stream.flush()
}
