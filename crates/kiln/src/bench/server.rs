//! `kiln bench --server`: images through a real server on this machine, over a real socket, beside the engine's own time.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kiln_engine::{LocalFiles, Model, Plan, Session};
use kiln_server::{Config, Server};
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::image::{PROMPT, request};
use super::source::Source;
use crate::args::BenchArgs;
use crate::failure::Failure;
use crate::serve::catalogue::{Models, Shared};
use crate::serve::generator::Worker;

/// Requests one after the other.
const REPEAT: u32 = 8;
/// Requests before them that don't count.
const WARM_UP: u32 = 3;
/// Requests at once.
const AT_ONCE: u32 = 32;
const NAME: &str = "measured";
/// An image takes no longer than this.
const PATIENCE: Duration = Duration::from_secs(600);

pub fn run(args: &BenchArgs) -> Result<(), Failure> {
    let size = args.size.unwrap_or((512, 512));
    let source = super::source(args)?;
    let model = source.model(3)?;
    let failed = |error: io::Error| Failure::new(format!("the server can't be measured: {error}"));
    let folder = tempfile::tempdir().map_err(failed)?;
    let models = Arc::new(Models::only(NAME, Arc::clone(&model)));
    let catalogue = Box::new(Shared(Arc::clone(&models)));
    let server = Server::open(Config::new(folder.path()), catalogue)
        .map_err(|error| Failure::new(error.to_string()))?;
    let session = Session::new(super::settings(args), crate::generate::MAX_BATCH);
    let generating = server.generate_with(Worker::new(session, models, None)).map_err(failed)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().map_err(failed)?;
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    runtime.spawn(kiln_server::serve(server.clone(), listener, std::future::pending()));
    let client = Client { address, args, size, quiet: args.json };
    let measured = client.measure(&model, &source);
    server.close();
    let _ = generating.join();
    let measured = measured.map_err(failed)?;
    let text = if args.json { format!("{:#}\n", measured) } else { table(&measured) };
    crate::print(text.as_bytes())
}

struct Client<'a> {
    address: SocketAddr,
    args: &'a BenchArgs,
    size: (usize, usize),
    quiet: bool,
}

impl Client<'_> {
    fn measure(&self, model: &Arc<Model>, source: &Source) -> io::Result<Value> {
        // Said before the model is loaded, and not by every request.
        Plan::new(model, &request(self.args, self.size), &LocalFiles).map_err(io::Error::other)?;
        self.say("loading the model");
        for seed in 0..WARM_UP {
            self.image(seed)?;
        }
        let repeat = self.args.repeat.unwrap_or(REPEAT);
        self.say("one request after the other");
        let before = self.inside()?;
        let mut one_by_one = Vec::new();
        for seed in 0..repeat {
            let began = Instant::now();
            self.image(100 + seed)?;
            one_by_one.push(began.elapsed().as_secs_f64());
        }
        let inside = (self.inside()? - before) / f64::from(repeat);
        one_by_one.sort_by(f64::total_cmp);
        self.say(&format!("{AT_ONCE} requests at once"));
        let began = Instant::now();
        let jobs = (0..AT_ONCE).map(|i| self.submit(1000 + i)).collect::<io::Result<Vec<_>>>()?;
        for job in &jobs {
            self.wait(job)?;
        }
        let at_once = began.elapsed().as_secs_f64();
        Ok(json!({
            "model": source.name(),
            "width": self.size.0,
            "height": self.size.1,
            "median": one_by_one[one_by_one.len() / 2],
            "slowest": one_by_one.last(),
            "queue_and_save": inside,
            "at_once": AT_ONCE,
            "images_per_second": f64::from(AT_ONCE) / at_once,
        }))
    }

    fn say(&self, what: &str) {
        if !self.quiet {
            let _ = writeln!(io::stderr(), "{what} …");
        }
    }

    fn body(&self, seed: u32) -> Value {
        let (width, height) = self.size;
        let max_tokens = self.args.max_tokens;
        // Words of its own for every request, so that no text is encoded only once.
        let mut body = json!({ "prompt": format!("{PROMPT}, {seed}"), "seed": seed, "steps": 4 });
        body["width"] = width.into();
        body["height"] = height.into();
        if let Some(tokens) = max_tokens {
            body["max_tokens"] = tokens.into();
        }
        body
    }

    /// An image by OpenAI's API.
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
        let answer = self.call("POST", "/v1/jobs", &self.body(seed).to_string())?;
        let job: Value = serde_json::from_slice(&answer)?;
        job["id"].as_str().map(str::to_owned).ok_or_else(|| io::Error::other("a job without an id"))
    }

    fn wait(&self, job: &str) -> io::Result<()> {
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            let answer: Value = serde_json::from_slice(&self.call("GET", &format!("/v1/jobs/{job}"), "")?)?;
            match answer["status"].as_str() {
                Some("done") => return Ok(()),
                Some("queued" | "running") => std::thread::sleep(Duration::from_millis(5)),
                _ => return Err(io::Error::other(answer.to_string())),
            }
        }
        Err(io::Error::other("a job takes too long"))
    }

    /// Seconds that jobs spent waiting for the generator and being saved, all together.
    fn inside(&self) -> io::Result<f64> {
        let metrics = self.call("GET", "/metrics", "")?;
        let metrics = String::from_utf8_lossy(&metrics);
        let sum = |phase: &str| {
            let name = format!("kiln_phase_seconds_sum{{phase=\"{phase}\"}} ");
            metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse::<f64>().ok()).unwrap_or(0.0)
        };
        Ok(sum("queue") + sum("save"))
    }

    /// An answer's body; a connection each, as most clients do.
    fn call(&self, method: &str, path: &str, body: &str) -> io::Result<Vec<u8>> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        let length = body.len();
        write!(
            stream,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
             Content-Length: {length}\r\n\r\n{body}"
        )?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer)?;
        let head = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap_or(0);
        if !answer.starts_with(b"HTTP/1.1 2") {
            return Err(io::Error::other(String::from_utf8_lossy(&answer).into_owned()));
        }
        Ok(answer.split_off(head + 4))
    }
}

fn table(measured: &Value) -> String {
    let number = |name: &str| measured[name].as_f64().unwrap_or(0.0);
    let mut text = format!(
        "{}, {}×{}, through a server on this machine\n\n",
        measured["model"].as_str().unwrap_or_default(),
        measured["width"],
        measured["height"]
    );
    let _ = writeln!(text, "one after the other, median     {:>9.1} ms", 1e3 * number("median"));
    let _ = writeln!(text, "one after the other, slowest    {:>9.1} ms", 1e3 * number("slowest"));
    let _ = writeln!(text, "of it in the queue and saving   {:>9.1} ms", 1e3 * number("queue_and_save"));
    let at_once = format!("{} at once", measured["at_once"]);
    let _ = writeln!(text, "{at_once:<31} {:>9.2} images a second", number("images_per_second"));
    text += "\nrequest sent to answer read, base64 included; `kiln bench --phase picture` has the engine's own time\n";
    text
}
