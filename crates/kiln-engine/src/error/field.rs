//! The fields that messages and hints name.

macro_rules! fields {
    ($($group:ident { $($field:ident = $name:literal,)* })*) => {
        /// A field of a request, a setting of a training, of the machine or of a command.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[expect(missing_docs, reason = "the fields themselves are documented")]
        pub enum Field {
            $($($field,)*)*
        }

        /// What a field belongs to.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[expect(missing_docs, reason = "the names say it")]
        pub enum FieldGroup {
            $($group,)*
        }

        impl Field {
            /// Every field.
            pub const ALL: &[Field] = &[$($(Field::$field,)*)*];

            /// Returns its name, as requests in JSON have it.
            pub const fn name(self) -> &'static str {
                match self {
                    $($(Field::$field => $name,)*)*
                }
            }

            /// Returns what it belongs to. What two groups have is in the first.
            pub const fn group(self) -> FieldGroup {
                match self {
                    $($(Field::$field)|* => FieldGroup::$group,)*
                }
            }
        }
    };
}

fields! {
    Request {
        Prompt = "prompt",
        NegativePrompt = "negative_prompt",
        OriginalPrompt = "original_prompt",
        Model = "model",
        Loras = "loras",
        LoraPartial = "lora_partial",
        DoraRule = "dora_rule",
        Vae = "vae",
        Width = "width",
        Height = "height",
        N = "n",
        Seed = "seed",
        Embeds = "embeds",
        MaxTokens = "max_tokens",
        TextLayers = "text_layers",
        References = "references",
        Init = "init",
        Mask = "mask",
        Strength = "strength",
        MaskPadding = "mask_padding",
        Upscale = "upscale",
        TileSize = "tile_size",
        Steps = "steps",
        Guidance = "guidance",
        Cache = "cache",
        Sigmas = "sigmas",
        Schedule = "schedule",
        Rho = "rho",
        Noise = "noise",
        OutputCompression = "output_compression",
    }
    // Of rewriting prompts, and of wildcards.
    Rewriting {
        Temperature = "temperature",
        UpsampleModel = "upsample_model",
        UpsampleUrl = "upsample_url",
        Wildcards = "wildcards",
    }
    // Of a model's parts and the machine.
    Machine {
        Transformer = "transformer",
        TextEncoder = "text_encoder",
        Tokenizer = "tokenizer",
        Variant = "variant",
        Device = "device",
        Dtype = "dtype",
        VramLimit = "vram_limit",
    }
    // Of a training.
    Training {
        Output = "output",
        Resume = "resume",
        Overwrite = "overwrite",
        LearningRate = "learning_rate",
        Warmup = "warmup",
        Checkpointing = "checkpointing",
        Resolution = "resolution",
        Batch = "batch",
        Optimizer = "optimizer",
        Repeats = "repeats",
        CaptionDropout = "caption_dropout",
        ReferenceDropout = "reference_dropout",
        Accumulate = "accumulate",
        WeightDecay = "weight_decay",
        Clip = "clip",
        Ema = "ema",
        Rank = "rank",
        Alpha = "alpha",
        Dropout = "dropout",
        Ranks = "ranks",
        Factor = "factor",
        SaveEvery = "save_every",
        SamplePrompts = "sample_prompts",
        SampleModel = "sample_model",
        SampleSteps = "sample_steps",
        Layout = "layout",
        Trigger = "trigger",
        NoCaptions = "no_captions",
        SkipBad = "skip_bad",
        DistilledAnyway = "distilled_anyway",
    }
    // Of commands on files.
    Command {
        Out = "out",
        To = "to",
        Part = "part",
        AcceptLicense = "accept_license",
    }
}
