//! Every variant of every kernel translates to what Vulkan, Metal and DirectX take: most of them can't run here.

use std::thread;

use naga::back::{hlsl, msl, spv};
use naga::valid::{Capabilities, ModuleInfo, ValidationFlags, Validator};
use naga::{AddressSpace, Module};

use super::*;
use crate::ops::kernels;

/// All combinations of the values of a kernel's constants.
fn variants(kernel: &Kernel) -> Vec<Vec<Value>> {
    kernel.constants.iter().fold(vec![Vec::new()], |variants, (_, values)| {
        let longer = |variant: &Vec<Value>, value: &Value| [variant.as_slice(), &[*value]].concat();
        variants.iter().flat_map(|variant| values.iter().map(move |value| longer(variant, value))).collect()
    })
}

fn parse(kernel: &Kernel, values: &[Value]) -> Result<(Module, ModuleInfo), String> {
    let shader = kernel.shader(values)?;
    let module = naga::front::wgsl::parse_str(&shader.wgsl).map_err(|e| e.emit_to_string(&shader.wgsl))?;
    // No capabilities: what every adapter has.
    let mut validator = Validator::new(ValidationFlags::all(), Capabilities::empty());
    let info = validator.validate(&module).map_err(|e| e.emit_to_string(&shader.wgsl))?;
    Ok((module, info))
}

fn check(kernel: &Kernel, values: &[Value]) -> Result<(), String> {
    let (module, info) = parse(kernel, values)?;
    let memory: u32 = module
        .global_variables
        .iter()
        .filter(|(_, variable)| variable.space == AddressSpace::WorkGroup)
        .map(|(_, variable)| module.types[variable.ty].inner.size(module.to_ctx()))
        .sum();
    if memory > 16_352 {
        return Err(format!("{memory} bytes of workgroup memory"));
    }
    let entry = naga::ShaderStage::Compute;
    let spirv = spv::PipelineOptions { shader_stage: entry, entry_point: "main".into() };
    spv::write_vec(&module, &info, &spv::Options::default(), Some(&spirv)).map_err(|e| e.to_string())?;
    let options = msl::Options { fake_missing_bindings: true, lang_version: (2, 4), ..Default::default() };
    msl::write_string(&module, &info, &options, &msl::PipelineOptions::default())
        .map_err(|e| e.to_string())?;
    let mut text = String::new();
    let options = hlsl::Options { fake_missing_bindings: true, ..Default::default() };
    let pipeline = hlsl::PipelineOptions::default();
    hlsl::Writer::new(&mut text, &options, &pipeline)
        .write(&module, &info, None)
        .map_err(|e| e.to_string())?;
    Ok(())
}

#[test]
fn every_variant_translates_to_spirv_msl_and_hlsl() {
    let all: Vec<(&Kernel, Vec<Value>)> = kernels()
        .into_iter()
        .flat_map(|kernel| variants(kernel).into_iter().map(move |values| (kernel, values)))
        .collect();
    assert!(all.len() > 300, "{} variants", all.len());
    let failed = |all: &[(&Kernel, Vec<Value>)]| -> Vec<String> {
        let check = |(kernel, values): &(&Kernel, Vec<Value>)| {
            check(kernel, values).err().map(|e| format!("{} {values:?}: {e}", kernel.name))
        };
        all.iter().filter_map(check).collect()
    };
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let failures: Vec<String> = thread::scope(|scope| {
        let parts = all.chunks(all.len().div_ceil(threads)).map(|part| scope.spawn(move || failed(part)));
        let parts: Vec<_> = parts.collect();
        parts.into_iter().flat_map(|part| part.join().unwrap()).collect()
    });
    assert!(failures.is_empty(), "{} of {}: {}", failures.len(), all.len(), distinct(&failures));
}

/// The first failure of each kernel.
fn distinct(failures: &[String]) -> String {
    let kernel = |failure: &String| failure.split(' ').next().map(str::to_string);
    let mut firsts: Vec<&String> = failures.iter().collect();
    firsts.dedup_by_key(|failure| kernel(failure));
    firsts.into_iter().map(String::as_str).collect::<Vec<_>>().join("\n")
}

#[test]
fn unknown_variants_are_errors() {
    let kernel = kernels()[0];
    assert!(kernel.shader(&[]).is_err());
    assert!(kernel.shader(&vec![Word("f64"); kernel.constants.len()]).is_err());
}
