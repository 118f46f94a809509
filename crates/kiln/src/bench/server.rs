//! `kiln bench --server`: what `kiln serve` adds to a picture's own time, over a real socket, with a painter who takes none.

use std::fmt::Write as _;
use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Instant;

use kiln_image::Picture;
use kiln_server::{Catalogue, Config, ModelInfo, Painted, Painter, Part, Server};
use tokio::net::TcpListener;

use crate::args::BenchArgs;
use crate::failure::Failure;

const REPEAT: usize = 20;
const WARM_UP: usize = 3;

/// Hands over a picture that is there already.
struct Ready(Picture);

impl Painter for Ready {
    fn paint(&mut self, parts: &mut [Part<'_>]) {
        for part in parts {
            // What a recipe is like.
            let recipe = format!("{{\"prompt\":\"{}\"}}", "word ".repeat(150));
            let painted = Painted { index: 0, picture: self.0.clone(), seed: Some(7), recipe };
            let result = part.watch.painted(painted);
            part.watch.ended(result);
        }
    }
}

struct Nothing;

impl Catalogue for Nothing {
    fn models(&self) -> Vec<ModelInfo> {
        Vec::new()
    }

    fn loras(&self) -> Vec<String> {
        Vec::new()
    }
}

pub fn run(args: &BenchArgs) -> Result<(), Failure> {
    let (width, height) = args.size.unwrap_or((1024, 1024));
    let failed = |error: io::Error| Failure::new(format!("the server can't be measured: {error}"));
    let folder = tempfile::tempdir().map_err(failed)?;
    let server = Server::open(Config::new(folder.path()), Box::new(Nothing))
        .map_err(|error| Failure::new(error.to_string()))?;
    let picture = likely(width as u32, height as u32)?;
    server.paint_with(Box::new(Ready(picture))).map_err(failed)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().map_err(failed)?;
    let listener = runtime.block_on(TcpListener::bind("127.0.0.1:0")).map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    runtime.spawn(kiln_server::serve(server.clone(), listener, std::future::pending()));
    let kinds = [("png, fast", "png", "fast"), ("png, small", "png", "small"), ("jpeg", "jpeg", "fast")];
    let mut rows = Vec::new();
    for (name, format, effort) in kinds {
        let body = format!("{{\"prompt\":\"a fox\",\"output_format\":\"{format}\",\"png\":\"{effort}\"}}");
        let repeat = args.repeat.unwrap_or(REPEAT);
        rows.push(measure(name, address, &body, repeat).map_err(failed)?);
    }
    server.close();
    let text = match args.json {
        true => format!("{:#}\n", serde_json::json!({ "width": width, "height": height, "kinds": rows })),
        false => table(&rows, width, height),
    };
    crate::print(text.as_bytes())
}

/// Milliseconds of one kind of file.
#[derive(serde::Serialize)]
struct Row {
    name: &'static str,
    /// Order taken to file written, by the server's own clock.
    inside: f64,
    /// Request sent to answer read, median.
    round_trip: f64,
    /// The same, the slowest of ten.
    slow: f64,
    bytes: usize,
}

fn measure(name: &'static str, address: SocketAddr, body: &str, repeat: usize) -> io::Result<Row> {
    let mut times = Vec::new();
    let mut bytes = 0;
    for _ in 0..WARM_UP {
        request(address, "POST", "/v1/images/generations", body)?;
    }
    let before = inside(address)?;
    for _ in 0..repeat {
        let began = Instant::now();
        bytes = request(address, "POST", "/v1/images/generations", body)?.len();
        times.push(began.elapsed().as_secs_f64() * 1e3);
    }
    let inside = (inside(address)? - before) / repeat as f64;
    times.sort_by(f64::total_cmp);
    let slow = times[(times.len() * 9 / 10).min(times.len() - 1)];
    Ok(Row { name, inside, round_trip: times[times.len() / 2], slow, bytes })
}

/// Milliseconds that orders spent waiting and being saved, all together.
fn inside(address: SocketAddr) -> io::Result<f64> {
    let metrics = request(address, "GET", "/metrics", "")?;
    let metrics = String::from_utf8_lossy(&metrics);
    let sum = |phase: &str| {
        let name = format!("kiln_phase_seconds_sum{{phase=\"{phase}\"}} ");
        metrics.lines().find_map(|line| line.strip_prefix(&name)?.parse::<f64>().ok()).unwrap_or(0.0)
    };
    Ok((sum("queue") + sum("save")) * 1e3)
}

/// An answer's body; a connection each, as most clients do.
fn request(address: SocketAddr, method: &str, path: &str, body: &str) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
         Content-Length: {length}\r\n\r\n{body}"
    )?;
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer)?;
    let head = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap_or(0);
    if !answer.starts_with(b"HTTP/1.1 200") {
        return Err(io::Error::other(String::from_utf8_lossy(&answer[..head]).into_owned()));
    }
    Ok(answer.split_off(head + 4))
}

/// A picture with shades, edges and grain: no harder and no easier to squeeze than a painted one.
fn likely(width: u32, height: u32) -> Result<Picture, Failure> {
    let mut noise = 1u32;
    let pixel = |i: u32| {
        let (x, y) = (i % width, i / width);
        let wave = |a: f32, b: f32| ((x as f32 * a + y as f32 * b).sin() + 1.0) * 100.0;
        let edge = if (x / 97 + y / 131).is_multiple_of(3) { 30.0 } else { 0.0 };
        [wave(0.011, 0.007), wave(0.006, -0.013), wave(-0.004, 0.01)].map(|v| {
            noise = noise.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (v + edge) as u8 + (noise >> 30) as u8
        })
    };
    let pixels = (0..width * height).flat_map(pixel).collect();
    Ok(Picture::new(width, height, pixels)?)
}

fn table(rows: &[Row], width: usize, height: usize) -> String {
    let mut text = format!("what the server adds to a picture of {width}x{height}, in milliseconds\n\n");
    let _ =
        writeln!(text, "{:<12} {:>8} {:>12} {:>8} {:>10}", "file", "inside", "round trip", "slow", "answer");
    for row in rows {
        let size = crate::values::bytes(row.bytes as u64);
        let Row { name, inside, round_trip, slow, .. } = row;
        let _ = writeln!(text, "{name:<12} {inside:>8.1} {round_trip:>12.1} {slow:>8.1} {size:>10}");
    }
    text += "\n`inside` is order taken to file written, `round trip` request sent to answer read over a socket, base64 included\n";
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_likely_picture_is_neither_noise_nor_plain() {
        let png = kiln_image::encode(&likely(256, 256).unwrap(), kiln_image::Format::Png, None).unwrap();
        let share = png.len() as f64 / (256.0 * 256.0 * 3.0);
        assert!((0.3..0.9).contains(&share), "{share}");
    }
}
