//! Gateways and workers in processes of their own, and the way to the queue that they share.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener as StdListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kiln_engine::{Phase, Progress, Request};
use kiln_image::RgbImage;
use kiln_server::fleet::{FleetConfig, open_gateway, open_worker};
use kiln_server::{Config, FinishedImage, Generator, JobError, JobInputs, JobSink, Task};
use serde_json::Value;

use crate::harness::{TestCatalogue, config, finished};

const ROLE: &str = "KILN_NODE_ROLE";
const URL: &str = "KILN_NODE_URL";
const FOLDER: &str = "KILN_NODE_FOLDER";
const SLEEP: &str = "KILN_NODE_SLEEP_MS";
const ACK_WAIT: &str = "KILN_NODE_ACK_WAIT_MS";
const PORT: &str = "KILN_NODE_PORT";

/// Sleeps instead of generating, in steps of a quarter. The prompt `poison` kills the process, `noise` gives a large file.
pub struct SleepingGenerator(pub Duration);

impl Generator for SleepingGenerator {
    type Plan = Arc<Request>;

    fn plan(&self, job: &JobInputs<'_>) -> Result<Arc<Request>, JobError> {
        for file in &job.request().references {
            job.image(file)?;
        }
        Ok(Arc::new(job.request().clone()))
    }

    fn generate(&self, tasks: Vec<Task<Arc<Request>>>) {
        for Task { plan, sink } in tasks {
            sink.ended(self.sleep(&plan, &*sink));
        }
    }

    fn finish(&self) {}
}

impl SleepingGenerator {
    fn sleep(&self, request: &Request, sink: &dyn JobSink) -> Result<(), JobError> {
        for step in 0..4 {
            if sink.cancelled() {
                return Err(JobError::cancelled());
            }
            let progress = Progress { phase: Phase::Steps, images: 1, step, steps: 4, ..Progress::default() };
            sink.progress(Progress { fraction: step as f32 / 4.0, ..progress });
            std::thread::sleep(self.0 / 4);
        }
        let image = match request.prompts[0].as_str() {
            "poison" => std::process::abort(),
            "noise" => noise(request),
            _ => finished(request, 0, 64, 64),
        };
        sink.image(image)
    }
}

/// An image of 1024² pixels whose file has 1.5 MB.
fn noise(request: &Request) -> FinishedImage {
    const SIDE: u32 = 1024;
    let mut state = request.seed[0] as u32 | 1;
    let pixels = (0..3 * SIDE * SIDE).map(|_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 28) as u8
    });
    let image = RgbImage::new(SIDE, SIDE, pixels.collect()).unwrap();
    FinishedImage { image, ..finished(request, 0, 1, 1) }
}

/// A gateway or worker.
pub struct Node {
    pub child: Child,
    pub port: u16,
    pub folder: PathBuf,
}

impl Node {
    pub fn start(role: &str, url: &str, folder: &Path, sleep_ms: u64, ack_wait_ms: u64, port: u16) -> Node {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "fleet::node::node", "--nocapture"])
            .env(ROLE, role)
            .env(URL, url)
            .env(FOLDER, folder)
            .env(SLEEP, sleep_ms.to_string())
            .env(ACK_WAIT, ack_wait_ms.to_string())
            .env(PORT, port.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
        let port = lines.find_map(|line| line.strip_prefix("port ")?.parse().ok()).unwrap_or(0);
        // The test harness of the process writes again after a minute.
        std::thread::spawn(move || lines.for_each(drop));
        Node { child, port, folder: folder.to_path_buf() }
    }

    pub fn signal(&self, name: &str) {
        Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap();
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Node {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Not a test: a process that tests start.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "started by another test"]
async fn node() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let number = |name: &str| std::env::var(name).unwrap().parse::<u64>().unwrap();
    // Ends with the process that started it.
    std::thread::spawn(|| {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        std::process::exit(0);
    });
    let fleet = FleetConfig {
        ack_wait: Duration::from_millis(number(ACK_WAIT)),
        ..FleetConfig::new(std::env::var(URL).unwrap().split(',').map(str::to_owned).collect())
    };
    let folder = PathBuf::from(std::env::var_os(FOLDER).unwrap());
    if role == "worker" {
        let worker = open_worker(Config::new(folder), fleet, Arc::new(TestCatalogue)).unwrap();
        let sleep = Duration::from_millis(number(SLEEP));
        worker.generate_with_all(vec![SleepingGenerator(sleep)]).unwrap();
        println!("\nport 1");
        return worker.serve(None, std::future::pending()).await;
    }
    let mut config = config(&folder);
    config.limits.queue = 1_000_000;
    config.io_timeout = Duration::from_secs(30);
    let server = open_gateway(config, fleet).unwrap();
    let port = u16::try_from(number(PORT)).unwrap();
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", port)).await.unwrap();
    println!("\nport {}", listener.local_addr().unwrap().port());
    kiln_server::serve(server, listener, std::future::pending()).await;
}

/// A request to a gateway; `None` if it gave no whole answer.
pub fn ask(port: u16, head: &str, body: &str) -> Option<(u16, Value)> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(40))).ok()?;
    let head = format!(
        "{head} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n",
        body.len()
    );
    let (first, rest) = head.split_once("\r\n")?;
    let (first, more) = first.split_once('|').map_or((first.to_owned(), String::new()), |(path, header)| {
        let (header, version) = header.split_once(" HTTP").unwrap();
        (format!("{path} HTTP{version}"), format!("{header}\r\n"))
    });
    stream.write_all(format!("{first}\r\n{more}{rest}\r\n{body}").as_bytes()).ok()?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).ok()?;
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split_whitespace().nth(1)?.parse().ok()?;
    Some((status, serde_json::from_str(body).unwrap_or(Value::Null)))
}

/// A way to the queue that can be closed.
pub struct Proxy {
    pub port: u16,
    closed: Arc<AtomicBool>,
    open: Arc<Mutex<Vec<TcpStream>>>,
}

/// What is sent to the queue: a message whose text contains this arrives late.
pub type Delay = Option<(&'static str, Duration)>;

/// Forwards one direction of a connection.
fn forward(mut from: TcpStream, mut to: TcpStream, delay: Delay) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        if let Some((text, delay)) = delay
            && buffer[..count].windows(text.len()).any(|window| window == text.as_bytes())
        {
            std::thread::sleep(delay);
        }
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both);
}

impl Proxy {
    pub fn start(target: u16) -> Proxy {
        Proxy::delaying(target, None)
    }

    pub fn delaying(target: u16, delay: Delay) -> Proxy {
        let listener = StdListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let (closed, open) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
        let (is_closed, opened) = (Arc::clone(&closed), Arc::clone(&open));
        std::thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if is_closed.load(SeqCst) {
                    continue;
                }
                let Ok(there) = TcpStream::connect(("127.0.0.1", target)) else { continue };
                for (from, to, delay) in [(&stream, &there, delay), (&there, &stream, None)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    let _ = from.set_nodelay(true);
                    std::thread::spawn(move || forward(from, to, delay));
                }
                opened.lock().unwrap().extend([stream, there]);
            }
        });
        Proxy { port, closed, open }
    }

    pub fn close(&self) {
        self.closed.store(true, SeqCst);
        for stream in self.open.lock().unwrap().drain(..) {
            let _ = stream.shutdown(Shutdown::Both);
        }
    }

    pub fn reopen(&self) {
        self.closed.store(false, SeqCst);
    }
}
