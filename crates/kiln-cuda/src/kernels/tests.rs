//! Compares declarations of kernels with the `__global__` functions of the sources.

use std::collections::BTreeMap;
use std::path::Path;

use crate::sources::{KernelSource, kernel_sources};

/// Names and types of a function's parameters; a pointer's type is `*`.
type Parameters = Vec<(String, String)>;

/// Replaces whole words.
fn replace_word(text: &str, word: &str, by: &str) -> String {
    let is_word = |c: char| c.is_alphanumeric() || c == '_';
    let (mut out, mut token) = (String::new(), String::new());
    for c in text.chars().chain(['\n']) {
        if is_word(c) {
            token.push(c);
            continue;
        }
        out.push_str(if token == word { by } else { &token });
        token.clear();
        out.push(c);
    }
    out
}

/// Splits `NAME(a, b)rest` into three parts.
fn call(text: &str) -> Option<(&str, Vec<&str>, &str)> {
    let (name, rest) = text.split_once('(')?;
    let (arguments, rest) = rest.split_once(')')?;
    Some((name.trim(), arguments.split(',').map(str::trim).collect(), rest))
}

/// Expands function-like macros at the beginning of lines.
fn expanded(text: &str) -> String {
    let joined = text.replace("\\\n", " ");
    let mut macros = BTreeMap::new();
    let mut out = String::new();
    for line in joined.lines() {
        if let Some((name, parameters, body)) = line.strip_prefix("#define ").and_then(call)
            && !name.contains(' ')
        {
            macros.insert(name, (parameters, body));
        } else if let Some((name, arguments, _)) = call(line)
            && let Some((parameters, body)) = macros.get(name)
        {
            let pairs = parameters.iter().zip(arguments);
            let body = pairs.fold(body.to_string(), |body, (p, a)| replace_word(&body, p, a));
            out.push_str(&body.replace("##", ""));
            out.push('\n');
        } else {
            out.push_str(line);
            out.push('\n');
        }
    }
    out
}

fn parameter(text: &str) -> (String, String) {
    let text = text.replace("const ", "").replace("__grid_constant__ ", "");
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match text.split_once('*') {
        Some((_, name)) => (name.trim().into(), "*".into()),
        None => {
            let (kind, name) = text.rsplit_once(' ').unwrap();
            (name.into(), kind.into())
        }
    }
}

/// The kernels of a source.
fn kernels(text: &str) -> BTreeMap<String, Parameters> {
    let text = expanded(text);
    let mut found = BTreeMap::new();
    for part in text.split("__global__ void").skip(1) {
        let mut part = part.trim_start();
        if let Some(bounds) = part.strip_prefix("__launch_bounds__") {
            // Up to the closing bracket.
            let mut depth = 0;
            let end = bounds.find(|c| {
                depth += i32::from(c == '(') - i32::from(c == ')');
                depth == 0
            });
            part = bounds[end.unwrap() + 1..].trim_start();
        }
        let (name, parameters, _) = call(part).unwrap();
        found.insert(name.to_string(), parameters.into_iter().map(parameter).collect());
    }
    found
}

/// A declared kernel: its name, `dtype` if there are two by dtype, and its parameters.
type Declared<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)]);

/// Asserts that a source has exactly the declared kernels.
pub(crate) fn compare(source: &'static str, declared: &[Declared<'_>]) {
    let mut expected = BTreeMap::new();
    for (name, by_dtype, parameters) in declared {
        let parameters: Parameters =
            parameters.iter().map(|&(name, kind)| (name.into(), kind.into())).collect();
        let suffixes = if by_dtype.is_empty() { &[""][..] } else { &["_f32", "_bf16"] };
        for suffix in suffixes {
            expected.insert(format!("{name}{suffix}"), parameters.clone());
        }
    }
    assert_eq!(expected, kernels(KernelSource { name: source }.text()), "{source}.cu");
}

#[test]
fn every_source_is_declared_once() {
    fn texts(folder: &Path, all: &mut String) {
        for entry in std::fs::read_dir(folder).unwrap().flatten() {
            match entry.path() {
                path if path.is_dir() => texts(&path, all),
                path => all.push_str(&std::fs::read_to_string(path).unwrap()),
            }
        }
    }
    let mut all = String::new();
    texts(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut all);
    for source in kernel_sources() {
        assert_eq!(all.matches(&format!("\n    \"{}\" {{\n", source.name)).count(), 1, "{}.cu", source.name);
    }
}

#[test]
fn macros_and_launch_bounds_are_parsed() {
    let text = "#define TWO(T, name)  \\\n  extern \"C\" __global__ void __launch_bounds__(32 * (1 + 1), 2) f_##name(const T *x, \\\n    \
                long long n, const __grid_constant__ Thing t) { g(x); } \\\n  extern \"C\" __global__ void h_##name(int a) {}\n\
                TWO(float, f32)\nTWO(bf16, bf16)\n";
    let found = kernels(text);
    assert_eq!(found.keys().collect::<Vec<_>>(), ["f_bf16", "f_f32", "h_bf16", "h_f32"]);
    let pair = |name: &str, kind: &str| (name.to_string(), kind.to_string());
    assert_eq!(found["f_f32"], [pair("x", "*"), pair("n", "long long"), pair("t", "Thing")]);
}
