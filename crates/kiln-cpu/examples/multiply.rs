//! Multiplies matrices a number of times and prints the multiply-adds, for a tool that counts instructions.
//!
//! `cargo run -p kiln-cpu --example multiply ISA FORMAT TIMES`, where ISA may be `loop`, the product as one would write it,
//! and FORMAT is f32, bf16 or int8. `tools/platforms/arm64.sh` runs it under qemu.

use std::error::Error;
use std::hint::black_box;

use kiln_cpu::{CpuBackend, CpuOptions};
use kiln_ops::{Backend, Residency};
use kiln_tensor::{DType, HostLinear, HostTensor, Rotation, bf16};

const ROWS: usize = 256;
const DEPTH: usize = 1024;
const COLS: usize = 256;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [isa, format, times] = &arguments[..] else { return Err("usage: multiply ISA FORMAT TIMES".into()) };
    let times: usize = times.parse()?;
    match isa.as_str() {
        "loop" => plain_loop(format, times)?,
        isa => kernels(isa, format, times)?,
    }
    println!("{}", times * ROWS * DEPTH * COLS);
    Ok(())
}

fn values(count: usize) -> Vec<f32> {
    (0..count).map(|i| (i * 7919 % 251) as f32 - 125.0).collect()
}

fn kernels(isa: &str, format: &str, times: usize) -> Result<(), Box<dyn Error>> {
    let b = CpuBackend::new(CpuOptions { isa: Some(isa.parse()?), threads: Some(1) })?;
    let weight = HostTensor::from_f32([COLS, DEPTH], values(COLS * DEPTH))?;
    let (linear, dtype) = match format {
        "f32" => (HostLinear::dense(vec![weight])?, DType::F32),
        "bf16" => (HostLinear::dense(vec![weight.to_dtype(DType::BF16)?])?, DType::BF16),
        "int8" => {
            let bytes: Vec<u8> = values(COLS * DEPTH).iter().map(|&v| v as i8 as u8).collect();
            let rows = HostTensor::new(DType::I8, [COLS, DEPTH], bytes.into())?;
            let scales = HostTensor::from_f32([COLS], vec![0.01; COLS])?;
            (HostLinear::int8(vec![rows], vec![scales], Rotation::None)?, DType::F32)
        }
        _ => return Err(format!("unknown format {format}").into()),
    };
    let w = b.load_weight(linear, Residency::Device)?;
    let x = b.upload(&HostTensor::from_f32([ROWS, DEPTH], values(ROWS * DEPTH))?, dtype)?;
    for _ in 0..times {
        black_box(b.linear(&x, &w)?);
    }
    Ok(())
}

/// `Σ x · w` of every element, in one loop.
macro_rules! product {
    ($values:ty, $sum:ty, $convert:expr, $times:expr) => {{
        let convert = |values: Vec<f32>| -> Vec<$values> { values.into_iter().map($convert).collect() };
        let (x, w) = (convert(values(ROWS * DEPTH)), convert(values(COLS * DEPTH)));
        for _ in 0..$times {
            for x in black_box(&x).chunks(DEPTH) {
                for w in black_box(&w).chunks(DEPTH) {
                    black_box(
                        x.iter().zip(w).map(|(&x, &w)| <$sum>::from(x) * <$sum>::from(w)).sum::<$sum>(),
                    );
                }
            }
        }
    }};
}

fn plain_loop(format: &str, times: usize) -> Result<(), Box<dyn Error>> {
    match format {
        "f32" => product!(f32, f32, |v| v * 0.5, times),
        "bf16" => product!(bf16, f32, bf16::from_f32, times),
        "int8" => product!(i8, i32, |v| v as i8, times),
        _ => return Err(format!("unknown format {format}").into()),
    }
    Ok(())
}
