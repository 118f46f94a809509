//! Files that ask for more memory than they seem to: what they take is known before they are decoded.

use std::path::PathBuf;
use std::process::Command;

use crate::hostile_files;
use kiln_image::{
    decoding_bytes, dimensions, from_bytes, from_bytes_with_mask, read_parameters, read_recipe,
};

/// What the server allows for one image.
const LIMIT: u64 = 768 << 20;
/// Memory that needs no reservation: stacks, the allocator's own, a text.
const SLACK: u64 = 12 << 20;
const CHILD: &str = "KILN_TEST_HOSTILE_FILE";

/// The memory of this process, in bytes: its peak, or what it has now.
fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_matches(|c: char| !c.is_ascii_digit()).parse::<u64>().unwrap() << 10
}

/// Runs in a process of its own, which has decoded nothing before.
#[test]
fn child_measures_one_file() {
    let Ok(path) = std::env::var(CHILD).map(PathBuf::from) else { return };
    let (name, file) = (path.file_name().unwrap().to_str().unwrap(), std::fs::read(&path).unwrap());
    let before = memory("VmHWM:");
    let _ = (dimensions("a", &file), read_recipe(&file), read_parameters(&file));
    let charged = decoding_bytes("a", &file);
    let asked = memory("VmHWM:") - before;
    assert!(asked < SLACK, "{name}: asking takes {} MiB", asked >> 20);
    let charged = charged.unwrap_or(0);
    if charged <= LIMIT {
        let _ = (from_bytes("a", &file).is_ok(), from_bytes_with_mask("a", &file).is_ok());
    }
    let taken = memory("VmHWM:") - before;
    assert!(taken <= charged + SLACK, "{name}: {} MiB charged, {} MiB taken", charged >> 20, taken >> 20);
    println!("{name}: {} KiB, {} MiB charged, {} MiB taken", file.len() >> 10, charged >> 20, taken >> 20);
}

#[test]
#[cfg(target_os = "linux")]
fn hostile_files_take_no_more_memory_than_they_are_charged_for() {
    let mut failed = Vec::new();
    let folder = tempfile::tempdir().unwrap();
    for (name, file) in hostile_files::all() {
        let path = folder.path().join(name);
        std::fs::write(&path, file).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["hostile::child_measures_one_file", "--exact", "--nocapture"])
            .env(CHILD, &path)
            .output()
            .unwrap();
        let text = [child.stdout, child.stderr].concat();
        let text = String::from_utf8_lossy(&text).into_owned();
        let line = text.lines().find(|line| line.starts_with(name)).unwrap_or(&text);
        println!("{line}");
        if !child.status.success() {
            failed.push(line.to_owned());
        }
    }
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn what_lies_beside_the_pixels_does_not_hide_them() {
    for (name, file) in hostile_files::all() {
        // One pixel, whatever else the file holds.
        if name.starts_with("png") {
            let image = from_bytes(name, &file).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!((image.width(), image.height(), image.pixels()), (1, 1, &[7, 7, 7][..]), "{name}");
        }
    }
}

/// libwebp's files have all transforms, colour caches and many groups of codes.
#[test]
fn lossless_files_of_libwebp_are_read_and_charged_little() {
    let (width, height) = (600u32, 420u32);
    let mut state = 0x2545_f491u32;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state
    };
    for kind in 0..5 {
        let mut pixels = Vec::new();
        for y in 0..height {
            for x in 0..width {
                let noise = random();
                let pixel = match kind {
                    0 => [x as u8, y as u8, (x + y) as u8],
                    1 => noise.to_le_bytes()[..3].try_into().unwrap(),
                    2 => [[0, 0, 0], [255, 255, 255], [200, 0, 0]][(x / 7 + y / 5) as usize % 3],
                    3 => [(noise % 12 * 20) as u8, 7, (x / 40 * 9) as u8],
                    // Halves that want codes of their own.
                    _ if x < width / 2 => [(noise & 3) as u8, 0, 0],
                    _ => [128 + (y / 3) as u8 % 64, (noise >> 8) as u8, x as u8],
                };
                pixels.extend::<[u8; 3]>(pixel);
            }
        }
        let file = webp::Encoder::from_rgb(&pixels, width, height).encode_lossless();
        let image = from_bytes("a", &file).unwrap_or_else(|error| panic!("{kind}: {error}"));
        assert_eq!(image.pixels(), pixels, "{kind}");
        let charged = decoding_bytes("a", &file).unwrap();
        assert!(charged < 64 << 20, "{kind}: {} MiB for {} KiB", charged >> 20, file.len() >> 10);
    }
}
