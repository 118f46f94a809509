//! How well watermarks are read from a folder of pictures after what happens to images, and how long they take to write and read.
//!
//!     cargo run --release -p kiln-engine --example watermark -- FOLDER

use std::error::Error;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kiln_engine::{FoundWatermark, Payload, add_watermark, read_watermark};
use kiln_image::{Encoding, Filter, Format, RgbImage, encode_with, from_bytes, open, resize};

/// Bits of 32 that have to be right.
const ENOUGH: u32 = 29;
const CHANGES: [&str; 7] =
    ["nothing", "JPEG 75", "JPEG 50", "WebP 80", "half the size", "crop to 90 %", "crop, JPEG 75"];

fn main() -> Result<(), Box<dyn Error>> {
    let folder = std::env::args().nth(1).ok_or("usage: watermark FOLDER")?;
    let mut files: Vec<PathBuf> =
        std::fs::read_dir(folder)?.map(|file| Ok(file?.path())).collect::<Result<_, std::io::Error>>()?;
    files.sort();
    let (mut right, mut found) = ([0u32; CHANGES.len()], [0u32; CHANGES.len()]);
    let mut decibels = Vec::new();
    let mut taken = [Duration::ZERO; 2];
    let (mut longest, mut taken_for_one, mut random) = (Duration::ZERO, 0, 1u32);
    for file in &files {
        let image = open(file)?;
        random = random.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let payload = Payload(random ^ random >> 13);
        let mut marked = image.clone();
        let start = Instant::now();
        add_watermark(&mut marked, payload)?;
        longest = longest.max(start.elapsed());
        taken[0] += start.elapsed();
        decibels.push(psnr(&image, &marked));
        let start = Instant::now();
        taken_for_one += u32::from(read_watermark(&image)?.is_some());
        taken[1] += start.elapsed();
        let mut bits = [0; CHANGES.len()];
        for (i, changed) in changes(&marked, random)?.iter().enumerate() {
            let read = read_watermark(changed)?;
            if let Some(FoundWatermark::Own { payload: read, .. }) = read {
                found[i] += 1;
                bits[i] = (read.0 ^ payload.0).count_zeros();
            }
            right[i] += u32::from(bits[i] >= ENOUGH);
        }
        if bits.iter().any(|bits| *bits < ENOUGH) {
            println!("{}: {bits:?}", file.display());
        }
    }
    let count = files.len() as f64;
    let least = decibels.iter().copied().fold(f64::INFINITY, f64::min);
    println!("{count} pictures, {:.1} dB, least {least:.1} dB", decibels.iter().sum::<f64>() / count);
    for (i, name) in CHANGES.iter().enumerate() {
        let share = |n: u32| 100.0 * f64::from(n) / count;
        println!(
            "{name:14} {ENOUGH} bits and more in {:.1} %, found in {:.1} %",
            share(right[i]),
            share(found[i])
        );
    }
    println!("without one: {taken_for_one} taken for one");
    let mean = |sum: Duration| sum.as_secs_f64() * 1e3 / count;
    println!(
        "writing {:.0} ms, at most {:.0}; reading {:.0} ms",
        mean(taken[0]),
        longest.as_secs_f64() * 1e3,
        mean(taken[1])
    );
    Ok(())
}

fn changes(image: &RgbImage, random: u32) -> Result<Vec<RgbImage>, Box<dyn Error>> {
    let (width, height) = (image.width(), image.height());
    let through = |image: &RgbImage, format: Format, quality: u8| -> Result<RgbImage, Box<dyn Error>> {
        let file = encode_with(image, Encoding { quality: Some(quality), ..format.into() }, None)?;
        Ok(from_bytes("image", &file)?)
    };
    let (w, h) = (width * 9 / 10, height * 9 / 10);
    let crop =
        image.crop(i64::from(random % (width - w + 1)), i64::from((random >> 16) % (height - h + 1)), w, h);
    Ok(vec![
        image.clone(),
        through(image, Format::Jpeg, 75)?,
        through(image, Format::Jpeg, 50)?,
        through(image, Format::Webp, 80)?,
        resize(image, width.div_ceil(2), height.div_ceil(2), Filter::Bicubic),
        crop.clone(),
        through(&crop, Format::Jpeg, 75)?,
    ])
}

fn psnr(a: &RgbImage, b: &RgbImage) -> f64 {
    let pairs = a.pixels().iter().zip(b.pixels());
    let error: f64 = pairs.map(|(a, b)| (f64::from(*a) - f64::from(*b)).powi(2)).sum();
    10.0 * (255.0f64.powi(2) * a.pixels().len() as f64 / error).log10()
}
