//! WGSL with a little preprocessing, so that one source serves all element types.
//!
//! Lines that start with `#` are directives; everything else is WGSL.
//!
//! - `#params rows, eps: f32`: the fields of the uniform `params`; without a type, u32.
//! - `#read x: X`, `#write y: f32`: a tensor, bound in this order, with its accessors (`accessors`). The type is a name or the
//!   value of a constant: f32, bf16, or `words` for raw 32-bit words.
//! - `#if W == q4_k, q5_k`, `#elif`, `#else`, `#end`: by the value of a constant.
//! - `#let BK 16`: another numeric constant.
//! - `#for i in 0..TILE`, `#end`: repeats lines with `{i}` replaced, where loops over registers must be unrolled.
//! - `#include exp`: a file of `kernels/` that several kernels share.
//!
//! Numeric constants are WGSL constants, too.

use std::fmt::Write as _;

use super::accessors::{self, Access};

/// The value of a constant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Value {
    /// A number: also a WGSL constant of its name.
    Number(u32),
    /// A word: an element type, a weight format, an operation.
    Word(&'static str),
}

impl std::fmt::Display for Value {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Value::Number(number) => number.fmt(f),
            Value::Word(word) => word.fmt(f),
        }
    }
}

/// The constants of one specialization.
pub(crate) type Constants = Vec<(String, Value)>;

/// A kernel's source for one specialization, and what it binds.
#[derive(Debug)]
pub(crate) struct Shader {
    pub wgsl: String,
    /// The names of its parameters, in the order of the uniform; those of the tensors' offsets follow.
    pub params: Vec<String>,
    /// Its tensors, in the order of their bindings.
    pub tensors: Vec<(String, Access)>,
}

/// A file of `kernels/` by its name in `#include`.
pub(crate) type Includes = fn(&str) -> Option<&'static str>;

/// Expands the directives of `source`. A mistake in the source is an error that names its line.
pub(crate) fn expand(source: &str, constants: &Constants, includes: Includes) -> Result<Shader, String> {
    let mut expander = Expander {
        constants: constants.clone(),
        includes,
        fields: Vec::new(),
        tensors: Vec::new(),
        body: String::new(),
    };
    expander.lines(&source.lines().collect::<Vec<_>>(), &[])?;
    Ok(expander.finish())
}

struct Expander {
    constants: Constants,
    includes: Includes,
    /// Names and types of the uniform's fields.
    fields: Vec<(String, String)>,
    tensors: Vec<(String, Access)>,
    body: String,
}

impl Expander {
    /// Expands lines, with the values of the enclosing loops' variables.
    fn lines(&mut self, lines: &[&str], variables: &[(String, u32)]) -> Result<(), String> {
        let mut at = 0;
        while let Some(line) = lines.get(at) {
            at += 1;
            let Some(directive) = line.trim_start().strip_prefix('#') else {
                self.body.push_str(&substitute(line, variables));
                self.body.push('\n');
                continue;
            };
            let (word, rest) = directive.split_once(' ').unwrap_or((directive, ""));
            let rest = rest.trim();
            match word {
                "params" => self.params(rest)?,
                "read" => self.tensor(rest, Access::Read)?,
                "write" => self.tensor(rest, Access::Write)?,
                "let" => {
                    let (name, number) = rest.split_once(' ').ok_or_else(|| format!("`{line}`"))?;
                    let number = Value::Number(self.number(number)?);
                    self.constants.push((name.to_string(), number));
                }
                "include" => {
                    let text = (self.includes)(rest).ok_or_else(|| format!("`{line}`: no such file"))?;
                    self.lines(&text.lines().collect::<Vec<_>>(), variables)?;
                }
                "for" => {
                    let end = at + block_end(&lines[at..]).ok_or_else(|| format!("`{line}` has no #end"))?;
                    let (name, range) = rest.split_once(" in ").ok_or_else(|| format!("`{line}`"))?;
                    let (from, to) = range.split_once("..").ok_or_else(|| format!("`{line}`"))?;
                    for value in self.number(from)?..self.number(to)? {
                        let mut variables = variables.to_vec();
                        variables.push((name.trim().into(), value));
                        self.lines(&lines[at..end], &variables)?;
                    }
                    at = end + 1;
                }
                "if" => {
                    let end = at + block_end(&lines[at..]).ok_or_else(|| format!("`{line}` has no #end"))?;
                    if let Some(taken) = self.taken(rest, &lines[at..end])? {
                        self.lines(taken, variables)?;
                    }
                    at = end + 1;
                }
                _ => return Err(format!("unknown directive `{line}`")),
            }
        }
        Ok(())
    }

    /// The lines of the first branch of an `#if` whose condition holds.
    fn taken<'l>(&self, condition: &str, lines: &'l [&'l str]) -> Result<Option<&'l [&'l str]>, String> {
        let (mut holds, mut start, mut depth) = (self.holds(condition)?, 0, 0);
        for (i, line) in lines.iter().enumerate() {
            let line = line.trim_start();
            if line.starts_with("#if ") || line.starts_with("#for ") {
                depth += 1;
            } else if line == "#end" {
                depth -= 1;
            } else if depth == 0 && (line.starts_with("#elif ") || line == "#else") {
                if holds {
                    return Ok(Some(&lines[start..i]));
                }
                holds = line.strip_prefix("#elif ").map_or(Ok(true), |condition| self.holds(condition))?;
                start = i + 1;
            }
        }
        Ok(holds.then_some(&lines[start..]))
    }

    fn holds(&self, condition: &str) -> Result<bool, String> {
        let (name, words) = condition.split_once("==").ok_or_else(|| format!("`#if {condition}`"))?;
        let value = self.constant(name.trim()).ok_or_else(|| format!("no constant `{}`", name.trim()))?;
        Ok(words.split(',').any(|word| word.trim() == value.to_string()))
    }

    fn constant(&self, name: &str) -> Option<Value> {
        self.constants.iter().find(|(other, _)| *other == name).map(|(_, value)| *value)
    }

    fn number(&self, text: &str) -> Result<u32, String> {
        match self.constant(text.trim()) {
            Some(Value::Number(number)) => Ok(number),
            _ => text.trim().parse().map_err(|_| format!("`{text}` is no number")),
        }
    }

    fn params(&mut self, list: &str) -> Result<(), String> {
        for field in list.split(',') {
            let (name, kind) = field.split_once(':').unwrap_or((field, "u32"));
            let (name, kind) = (name.trim(), kind.trim());
            if !matches!(kind, "u32" | "f32" | "i32") {
                return Err(format!("parameter `{name}` has type `{kind}`"));
            }
            self.fields.push((name.into(), kind.into()));
        }
        Ok(())
    }

    fn tensor(&mut self, declaration: &str, access: Access) -> Result<(), String> {
        let (name, kind) =
            declaration.split_once(':').ok_or_else(|| format!("`{declaration}` has no type"))?;
        let (name, kind) = (name.trim(), kind.trim());
        let kind = self.constant(kind).map_or_else(|| kind.to_string(), |value| value.to_string());
        self.tensors.push((name.into(), access));
        self.body += &accessors::of(name, &kind, access, self.tensors.len())?;
        Ok(())
    }

    fn finish(self) -> Shader {
        let params: Vec<String> = self.fields.iter().map(|(name, _)| name.clone()).collect();
        let offsets = self.tensors.iter().map(|(name, _)| (format!("{name}_at"), "u32".to_string()));
        let mut wgsl = String::new();
        for (name, value) in &self.constants {
            if let Value::Number(number) = value {
                let _ = writeln!(wgsl, "const {name}: u32 = {number}u;");
            }
        }
        wgsl += "struct Params {\n";
        for (name, kind) in self.fields.into_iter().chain(offsets) {
            let _ = writeln!(wgsl, "    {name}: {kind},");
        }
        wgsl += "}\n@group(0) @binding(0) var<uniform> params: Params;\n";
        wgsl += accessors::SHARED;
        wgsl += &self.body;
        Shader { wgsl, params, tensors: self.tensors }
    }
}

/// The index of the `#end` of the block whose first line comes first.
fn block_end(lines: &[&str]) -> Option<usize> {
    let mut depth = 0;
    lines.iter().position(|line| {
        let line = line.trim_start();
        if line.starts_with("#if ") || line.starts_with("#for ") {
            depth += 1;
        } else if line == "#end" {
            if depth == 0 {
                return true;
            }
            depth -= 1;
        }
        false
    })
}

fn substitute(line: &str, variables: &[(String, u32)]) -> String {
    let mut line = line.to_string();
    for (name, value) in variables {
        line = line.replace(&format!("{{{name}}}"), &value.to_string());
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(source: &str, constants: &Constants) -> Result<String, String> {
        let shader = expand(source, constants, |name| (name == "one").then_some("let one = 1;"))?;
        let (_, body) = shader.wgsl.split_once(accessors::SHARED).unwrap();
        Ok(body.split_whitespace().collect::<Vec<_>>().join(" "))
    }

    #[test]
    fn branches_and_loops_nest() {
        let source = "#for i in 0..N\n#if KIND == b, c\n#for j in 0..2\nx{i}{j}\n#end\n#elif KIND == d\nd\n#else\nother\n#end\n#end";
        let of = |kind| {
            body(source, &vec![("N".into(), Value::Number(2)), ("KIND".into(), Value::Word(kind))]).unwrap()
        };
        assert_eq!(of("c"), "x00 x01 x10 x11");
        assert_eq!(of("d"), "d d");
        assert_eq!(of("a"), "other other");
        assert_eq!(body("#include one", &Vec::new()).unwrap(), "let one = 1;");
    }

    #[test]
    fn mistakes_are_errors() {
        for source in
            ["#for i in 0..2\nx", "#if A == b\n#end", "#nothing", "#read x", "#include two", "#params x: f64"]
        {
            assert!(body(source, &Vec::new()).is_err(), "{source}");
        }
    }

    #[test]
    fn parameters_come_before_the_offsets_of_tensors() {
        let shader =
            expand("#params rows, eps: f32\n#read x: bf16\n#write y: f32", &Vec::new(), |_| None).unwrap();
        assert_eq!(shader.params, ["rows", "eps"]);
        assert!(shader.wgsl.contains("rows: u32,\n    eps: f32,\n    x_at: u32,\n    y_at: u32,"));
        assert_eq!(shader.tensors, [("x".to_string(), Access::Read), ("y".to_string(), Access::Write)]);
    }
}
