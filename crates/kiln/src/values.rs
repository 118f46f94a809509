//! Option values with a grammar of their own.

use std::path::{Path, PathBuf};

/// `FILE[:WEIGHT]`
#[derive(Clone, Debug, PartialEq)]
pub struct LoraArg {
    pub path: PathBuf,
    pub weight: f32,
}

impl LoraArg {
    /// What follows the last colon is a weight only when it is a number, and the whole is not itself a file: names may
    /// contain colons, and drives do. Behind the name of a file it can't be anything else.
    pub fn parse(text: &str) -> Result<LoraArg, String> {
        let whole = || LoraArg { path: text.into(), weight: 1.0 };
        let weight = |number: &str| number.parse::<f32>().ok().filter(|w| w.is_finite());
        Ok(match text.rsplit_once(':') {
            _ if text.is_empty() => return Err("expected a file".into()),
            Some((path, number)) if !path.is_empty() && !Path::new(text).exists() => match weight(number) {
                Some(weight) => LoraArg { path: path.into(), weight },
                None if Path::new(path).is_file() => {
                    return Err(format!(
                        "`{path}` is followed by `{number}`, expected a finite number as its weight"
                    ));
                }
                None => whole(),
            },
            _ => whole(),
        })
    }
}

/// Where to compute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    Auto,
    Cpu,
    /// An NVIDIA GPU by number.
    Cuda(usize),
}

impl Device {
    pub fn parse(text: &str) -> Result<Device, String> {
        let number = |n: &str| n.parse().map(Device::Cuda);
        match (text, text.strip_prefix("cuda:").map(number)) {
            ("auto", _) => Ok(Device::Auto),
            ("cpu", _) => Ok(Device::Cpu),
            ("cuda", _) => Ok(Device::Cuda(0)),
            (_, Some(Ok(device))) => Ok(device),
            _ => Err("expected auto, cpu, cuda or cuda:N".into()),
        }
    }
}

/// A number of bytes: `500M`, `5G`, `2GiB`.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    const UNITS: [(char, u32); 4] = [('K', 10), ('M', 20), ('G', 30), ('T', 40)];
    let wrong = || format!("`{text}` is no size such as 500M or 5G");
    let upper = text.to_uppercase();
    let number = upper.trim_end_matches("IB").trim_end_matches('B');
    let (digits, shift) = match UNITS.iter().find(|(unit, _)| number.ends_with(*unit)) {
        Some((unit, shift)) => (number.trim_end_matches(*unit), *shift),
        None => (number, 0),
    };
    let count: u64 = digits.trim().parse().map_err(|_| wrong())?;
    count.checked_mul(1 << shift).filter(|n| *n > 0).ok_or_else(wrong)
}

/// Bytes for people: `3.2 GiB`.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1000.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// A count for people: `3.88 billion`, `12,345`.
pub fn count(n: u64) -> String {
    match n {
        1_000_000_000.. => format!("{:.2} billion", n as f64 / 1e9),
        1_000_000.. => format!("{:.2} million", n as f64 / 1e6),
        1000.. => format!("{},{:03}", n / 1000, n % 1000),
        _ => n.to_string(),
    }
}

/// `1 step`, `2 steps`
pub fn plural(n: usize, noun: &str) -> String {
    format!("{n} {noun}{}", if n == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lora(text: &str) -> (String, f32) {
        let lora = LoraArg::parse(text).unwrap();
        (lora.path.display().to_string(), lora.weight)
    }

    #[test]
    fn a_lora_weight_is_what_follows_the_last_colon_if_it_is_a_number() {
        assert_eq!(lora("ink.safetensors"), ("ink.safetensors".into(), 1.0));
        assert_eq!(lora("ink.safetensors:0.5"), ("ink.safetensors".into(), 0.5));
        assert_eq!(lora("ink.safetensors:-1"), ("ink.safetensors".into(), -1.0));
        assert_eq!(lora(r"C:\ink.safetensors"), (r"C:\ink.safetensors".into(), 1.0));
        assert_eq!(lora(r"C:\ink.safetensors:2e-1"), (r"C:\ink.safetensors".into(), 0.2));
        assert_eq!(lora("a:b:3"), ("a:b".into(), 3.0));
        assert_eq!(lora("ink:nan"), ("ink:nan".into(), 1.0));
        assert_eq!(lora(":3"), (":3".into(), 1.0));
        assert!(LoraArg::parse("").is_err());
    }

    #[test]
    fn a_file_whose_name_ends_like_a_weight_is_that_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("ink:2");
        std::fs::write(&path, b"").unwrap();
        assert_eq!(lora(path.to_str().unwrap()), (path.display().to_string(), 1.0));
    }

    #[test]
    fn a_weight_that_is_no_number_is_refused_behind_the_name_of_a_file() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for wrong in ["nan", "inf", "abc", ""] {
            let told = LoraArg::parse(&format!("{}:{wrong}", file.path().display())).unwrap_err();
            assert!(told.contains(&format!("`{wrong}`, expected a finite number")), "{told}");
        }
    }

    #[test]
    fn sizes_have_a_unit_or_are_bytes() {
        let sizes = ["6G", "6g", "6GiB", "6144M", "6442450944"].map(|text| parse_bytes(text).unwrap());
        assert_eq!(sizes, [6 << 30; 5]);
        for wrong in ["", "0", "0G", "-1G", "six", "6X", "99999999999999999999", "99999999999T"] {
            assert!(parse_bytes(wrong).unwrap_err().contains("such as 500M or 5G"), "{wrong}");
        }
    }

    #[test]
    fn devices_are_named_with_or_without_a_number() {
        assert_eq!(Device::parse("cuda"), Ok(Device::Cuda(0)));
        assert_eq!(Device::parse("cuda:3"), Ok(Device::Cuda(3)));
        assert_eq!(Device::parse("auto"), Ok(Device::Auto));
        for wrong in ["", "gpu", "cuda:", "cuda:x", "CPU"] {
            assert!(Device::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn amounts_read_well() {
        assert_eq!([0, 999, 1024, 1 << 30].map(bytes), ["0 B", "999 B", "1.0 KiB", "1.0 GiB"]);
        assert_eq!(
            [7, 1234, 4_560_000, 3_880_000_000].map(count),
            ["7", "1,234", "4.56 million", "3.88 billion"]
        );
    }
}
