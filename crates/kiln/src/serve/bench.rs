//! `kiln bench --server`: measures requests to a server in this process, over a real socket.
//! Random weights generate noise, whose PNG is three times as large as a photograph's.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_engine::{LocalFiles, Model, Plan, Session, Settings};
use kiln_server::{Config, Server};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::catalogue::ModelCatalogue;
use super::generator::Worker;
use super::process;
use crate::args::BenchArgs;
use crate::bench::image::{PROMPT, request};
use crate::bench::plan;
use crate::bench::source::ModelSource;
use crate::error::CliError;
use crate::output;

/// Default number of sequential requests.
const REPEAT: u32 = 8;
/// Unmeasured requests before them.
const WARM_UP: u32 = 3;
/// Concurrent requests.
const CONCURRENT: u32 = 32;
const NAME: &str = "measured";
/// Timeout of a request.
const TIMEOUT: Duration = Duration::from_secs(600);

pub fn run(args: &BenchArgs) -> Result<(), CliError> {
    let size = args.size.unwrap_or((512, 512));
    let source = plan::source(args)?;
    let model = source.model(3)?;
    let failed = |error: io::Error| CliError::new(format!("can't measure the server: {error}"));
    let folder = tempfile::tempdir().map_err(failed)?;
    let models = Arc::new(ModelCatalogue::single(NAME, Arc::clone(&model)));
    let server = Server::open(Config::new(folder.path()), models.clone())
        .map_err(|error| CliError::new(error.to_string()))?;
    let session = Session::new(plan::settings(args)?, Settings::MAX_BATCH);
    let generating = server.generate_with(Worker::new(session.into(), models, None)).map_err(failed)?;
    let runtime = process::runtime()?;
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    runtime.spawn(kiln_server::serve(server.clone(), listener, std::future::pending()));
    let client = Client { address, args, size, quiet: args.json };
    let measured = client.measure(&model, &source);
    server.close();
    let _ = generating.join();
    let measured = measured.map_err(failed)?;
    let text = if args.json { format!("{:#}\n", measured) } else { table(&measured) };
    output::print(text.as_bytes())
}

struct Client<'a> {
    address: SocketAddr,
    args: &'a BenchArgs,
    size: (usize, usize),
    quiet: bool,
}

impl Client<'_> {
    fn measure(&self, model: &Arc<Model>, source: &ModelSource) -> io::Result<Value> {
        // Report an invalid request before the model is loaded.
        Plan::new(model, &request(self.args, self.size), &LocalFiles).map_err(io::Error::other)?;
        self.message("loading the model");
        for seed in 0..WARM_UP {
            self.image(seed)?;
        }
        let repeat = self.args.repeat.unwrap_or(REPEAT);
        self.message("one request after the other");
        let before = self.queue_and_save_seconds()?;
        let mut latencies = Vec::new();
        for seed in 0..repeat {
            let start = Instant::now();
            self.image(100 + seed)?;
            latencies.push(start.elapsed().as_secs_f64());
        }
        let queue_and_save = (self.queue_and_save_seconds()? - before) / f64::from(repeat);
        latencies.sort_by(f64::total_cmp);
        self.message(&format!("{CONCURRENT} requests at once"));
        let start = Instant::now();
        let jobs = (0..CONCURRENT).map(|i| self.submit(1000 + i)).collect::<io::Result<Vec<_>>>()?;
        for job in &jobs {
            self.wait(job)?;
        }
        let seconds = start.elapsed().as_secs_f64();
        Ok(json!({
            "model": source.name(),
            "width": self.size.0,
            "height": self.size.1,
            "median": latencies[latencies.len() / 2],
            "slowest": latencies.last(),
            "queue_and_save": queue_and_save,
            "at_once": CONCURRENT,
            "images_per_second": f64::from(CONCURRENT) / seconds,
        }))
    }

    fn message(&self, text: &str) {
        if !self.quiet {
            let _ = writeln!(io::stderr(), "{text} …");
        }
    }

    fn body(&self, seed: u32) -> Value {
        let (width, height) = self.size;
        let max_tokens = self.args.max_tokens;
        // A different prompt per request, so that none is in the text cache.
        let mut body = json!({ "prompt": format!("{PROMPT}, {seed}"), "seed": seed, "steps": 4 });
        body["width"] = width.into();
        body["height"] = height.into();
        if let Some(tokens) = max_tokens {
            body["max_tokens"] = tokens.into();
        }
        body
    }

    /// Generates an image through the OpenAI API.
    fn image(&self, seed: u32) -> io::Result<()> {
        let mut body = self.body(seed);
        let fields = body.as_object_mut().into_iter().next();
        if let Some(fields) = fields {
            fields.remove("width");
            fields.remove("height");
            fields.insert("size".into(), format!("{}x{}", self.size.0, self.size.1).into());
        }
        self.call("POST", "/v1/images/generations", &body.to_string()).map(drop)
    }

    fn submit(&self, seed: u32) -> io::Result<String> {
        let response = self.call("POST", "/v1/jobs", &self.body(seed).to_string())?;
        let job: Value = serde_json::from_slice(&response)?;
        job["id"].as_str().map(str::to_owned).ok_or_else(|| io::Error::other("a job without an id"))
    }

    fn wait(&self, job: &str) -> io::Result<()> {
        let start = Instant::now();
        while start.elapsed() < TIMEOUT {
            let response: Value =
                serde_json::from_slice(&self.call("GET", &format!("/v1/jobs/{job}"), "")?)?;
            match response["status"].as_str() {
                Some("done") => return Ok(()),
                Some("queued" | "running") => std::thread::sleep(Duration::from_millis(5)),
                _ => return Err(io::Error::other(response.to_string())),
            }
        }
        Err(io::Error::other("a job timed out"))
    }

    /// Returns the total seconds that jobs spent in the queue and being saved.
    fn queue_and_save_seconds(&self) -> io::Result<f64> {
        let metrics = self.call("GET", "/metrics", "")?;
        let metrics = String::from_utf8_lossy(&metrics);
        let sum = |phase: &str| {
            let name = format!("kiln_phase_seconds_sum{{phase=\"{phase}\"}} ");
            metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse::<f64>().ok()).unwrap_or(0.0)
        };
        Ok(sum("queue") + sum("save"))
    }

    /// Sends a request on a new connection, as most clients do, and returns the response's body.
    fn call(&self, method: &str, path: &str, body: &str) -> io::Result<Vec<u8>> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        )?;
        let mut response = Vec::new();
        stream.read_to_end(&mut response)?;
        let head = response.windows(4).position(|window| window == b"\r\n\r\n").unwrap_or(0);
        if !response.starts_with(b"HTTP/1.1 2") {
            return Err(io::Error::other(String::from_utf8_lossy(&response).into_owned()));
        }
        Ok(response.split_off(head + 4))
    }
}

fn table(measured: &Value) -> String {
    let number = |name: &str| measured[name].as_f64().unwrap_or(0.0);
    let mut text = format!(
        "{}, {}×{}, through a local server\n\n",
        measured["model"].as_str().unwrap_or_default(),
        measured["width"],
        measured["height"]
    );
    let _ = writeln!(text, "one after the other, median     {:>9.1} ms", 1e3 * number("median"));
    let _ = writeln!(text, "one after the other, slowest    {:>9.1} ms", 1e3 * number("slowest"));
    let _ = writeln!(text, "  of which queue and saving     {:>9.1} ms", 1e3 * number("queue_and_save"));
    let at_once = format!("{} at once", measured["at_once"]);
    let _ = writeln!(text, "{at_once:<31} {:>9.2} images per second", number("images_per_second"));
    text += "\nfrom sending a request to reading its response, with base64; `kiln bench --phase image` measures the \
             engine alone\n";
    text
}
