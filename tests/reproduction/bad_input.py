"""Command lines that are wrong, by kind, and what the one line that refuses each must say."""

TABLE: dict[str, dict[str, list[str]]] = {
    "numbers out of range": {
        "train.py recipe.epochs=0": ["recipe.epochs=0", "greater than or equal to 1"],
        "train.py recipe.lr=-1e-3": ["recipe.lr=-0.001", "greater than 0"],
        "train.py recipe.ema_decay=1": ["recipe.ema_decay=1", "less than 1"],
        "train.py devices=0": ["devices=0", "greater than or equal to 1"],
        "train.py seed=-1": ["seed=-1", "greater than or equal to 0"],
        "train.py recipe.warmup_epochs=99": ["recipe.warmup_epochs=99", "recipe.epochs="],
        "train.py augmentation=[manifold_mixup] augmentation.manifold_mixup.alpha=0": ["alpha=0"],
        "train.py augmentation.htm.tau=-0.5": [
            "augmentation.htm.tau=-0.5",
            "a number, 0 or more",
        ],
        "train.py augmentation.htm.rho=1.5": ["augmentation.htm.rho=1.5", "0..1", "inf"],
        "train.py dataset.std=[0,1,1]": ["dataset.std.0=0", "greater than"],
        "train.py augmentation=[mixup] augmentation.mixup.prob=1.5": ["prob=1.5"],
        "train.py recipe.transforms.hflip=-1": ["hflip=-1"],
        "train.py recipe.label_smoothing=1": ["label_smoothing=1"],
        "train.py model.drop=1": ["model.drop=1"],
        "train.py dataset.limit=0": ["dataset.limit=0"],
        "train.py dataset.limit=2000": ["dataset.limit=2000", "1437"],
    },
    "values of another type": {
        "train.py recipe.epochs=ten": ["recipe.epochs=ten", "valid integer"],
        "train.py recipe.epochs=2.5": ["recipe.epochs=2.5", "valid integer"],
        "train.py seed=true": ["seed=True", "integer"],
        "train.py dataset.mean=0.5": ["dataset.mean=0.5", "list"],
        "train.py compile=yes": ["compile=yes", "boolean"],
        "train.py seed=1.5": ["seed=1.5", "integer"],
        "train.py recipe.batch_size=[1,2]": ["recipe.batch_size=[1, 2]", "integer"],
        "train.py dataset.limit={a:1}": ["dataset.limit={'a': 1}", "integer"],
        "train.py compile=1": ["compile=1", "boolean"],
        "train.py output_root=3": ["output_root=3", "string"],
        "train.py augmentation.htm=1": ["augmentation.htm=1", "mapping of settings"],
        "train.py recipe.lr=null": ["recipe.lr=None", "number"],
        "train.py recipe=null": ["recipe=null", "no such option"],
    },
    "not a number": {
        "train.py recipe.lr=nan": ["recipe.lr=nan", "finite"],
        "train.py augmentation.htm.tau=nan": [
            "augmentation.htm.tau=nan",
            "a number, 0 or more",
        ],
        "train.py augmentation.htm.rho=nan": ["augmentation.htm.rho=nan", "0..1"],
    },
    "batches that do not divide or leave one image": {
        "train.py recipe.batch_size=0": ["recipe.batch_size=0", "greater than or equal to 1"],
        "train.py recipe.grad_accum_steps=0": [
            "recipe.grad_accum_steps=0",
            "greater than or equal to 1",
        ],
        "train.py recipe.grad_accum_steps=6 dataset.limit=55 recipe.batch_size=10 devices=2": [
            "recipe.grad_accum_steps=6",
            "leave 4 images to a rank, allowed is 1..4",
        ],
        "train.py model=resnet18 augmentation=[] recipe.batch_size=6 recipe.grad_accum_steps=4": [
            "recipe.batch_size=6",
            "one image",
        ],
        "train.py recipe.batch_size=64 devices=3": ["recipe.batch_size=64", "devices=3"],
        "train.py dataset.limit=3 devices=4": ["devices=4", "3 training images"],
        "train.py model=resnet18 augmentation=[] recipe.batch_size=1": [
            "recipe.batch_size=1",
            "one image",
        ],
    },
    "words that are no choice": {
        "train.py device=tpu": ["device=tpu", "'auto', 'cpu' or 'cuda'"],
        "train.py recipe.precision=fp16": ["recipe.precision=fp16", "'float16'"],
        "train.py augmentation.htm.detector=salient": [
            "augmentation.htm.detector='salient'",
            "attention",
        ],
        "train.py augmentation.htm.matching=best": ["augmentation.htm.matching='best'", "optimal"],
        "train.py augmentation.htm.mask_rule=own": [
            "augmentation.htm.mask_rule='own'",
            "published",
        ],
        "train.py augmentation.htm.order=front": ["augmentation.htm.order='front'", "in_place"],
        "train.py resume=always": ["resume=always", "'auto'"],
        "train.py recipe.optimizer=adam": ["optimizer=adam", "'adamw'"],
        "train.py model.pooling=max": ["model.pooling=max"],
        "train.py recipe.schedule_step=second": ["schedule_step=second"],
        "train.py augmentation.htm.pooling=max": ["pooling='max'"],
    },
    "unknown keys": {
        "train.py recipe.lrr=1": ["recipe.lrr", "unknown key", "lr,"],
        "train.py +recipe.lrr=1": ["recipe.lrr=1", "unknown key", "lr,"],
        "train.py typo=1": ["typo", "unknown key", "recipe"],
        "train.py +typo=1": ["typo=1", "unknown key", "recipe"],
    },
    "unknown options of a group": {
        "train.py model=cct7": ["model=cct7", "no such option", "cct_7_3x1"],
        "train.py augmentation=[mixup,cutout]": [
            "augmentation=cutout",
            "cutmix, htm, manifold_mixup, mixup, vtm",
        ],
        "train.py experiment=table9": ["experiment=table9", "no such option"],
        "train.py augmentation=[[htm]]": ["augmentation=[[htm]]"],
    },
    "settings of the method that do not fit the model": {
        "train.py augmentation.vtm.class_token_offset=published": [
            "pools no class token",
            "allowed is paper",
        ],
        "train.py augmentation.htm.rollout_steps=-1": ["augmentation.htm.rollout_steps=-1"],
        "train.py augmentation.htm.rollout_steps=1": [
            "rollout_steps=1",
            "0 blocks after htm.layer=1",
        ],
        "train.py augmentation.htm.layer=0 augmentation.htm.rollout_steps=1 "
        "augmentation.htm.detector=random": ["augmentation.htm.rollout_steps=1", "detector=random"],
        "train.py augmentation.vtm.kappa=0": [
            "augmentation.vtm.kappa=0",
            "a whole number, 1 or more",
        ],
        "train.py augmentation.vtm.kappa=65": ["augmentation.vtm.kappa=65", "1..64"],
        "train.py augmentation.htm.pooling=class_token": [
            "pooling=class_token",
            "auto, attention or average",
        ],
    },
    "layers that the model has not": {
        "train.py augmentation=[manifold_mixup]": ["manifold_mixup.layers=[0, 1, 2]", "has 0..1"],
        "train.py augmentation=[manifold_mixup] augmentation.manifold_mixup.layers=[]": [
            "layers=[]"
        ],
        "train.py augmentation=[manifold_mixup] augmentation.manifold_mixup.layers=[1,1]": [
            "layers=[1, 1]"
        ],
        "train.py augmentation.htm.layer=2": ["augmentation.htm.layer=2", "0..1"],
        "train.py augmentation.vtm.layer=0": [
            "augmentation.vtm.layer=0",
            "a block's index, 1 or more",
        ],
        "train.py model.conv_layers=null": ["model.conv_layers=None"],
    },
    "settings of what the stack does not name": {
        "train.py augmentation=[mixup] augmentation.htm.tau=1": [
            "augmentation.htm",
            "does not name htm",
        ],
        "train.py augmentation=[mixup] +augmentation.htm.tau=1": [
            "augmentation.htm",
            "does not name htm",
        ],
        "train.py augmentation=[] augmentation.vtm.kappa=3": [
            "augmentation.vtm",
            "does not name vtm",
        ],
    },
    "settings taken away": {
        "train.py augmentation.htm=null": ["augmentation.htm", "leave it out"],
        "train.py ~augmentation.htm": ["augmentation.htm", "the stack names it"],
        "train.py ~seed": ["seed", "no value"],
    },
    "options of Hydra that are not available": {
        "train.py --config-name=eval": ["--config-name", "not available"],
        "train.py --sweep": ["--sweep", "--help"],
        "train.py -m --cfg job": ["--multirun", "without --cfg"],
        "train.py --config-dir=/": ["--config-dir"],
        "train.py --shell-completion": ["--shell-completion", "not available"],
        "train.py --cfg all --info all": ["--cfg"],
        "train.py --run --multirun": ["--multirun", "without"],
        "train.py --package=x --cfg job": ["--package"],
        "train.py --cfg job typo=1": ["typo", "unknown key"],
        "train.py --cfg": ["--cfg"],
        "train.py -m --info": ["--info"],
    },
    "sweeps with a broken point": {
        "train.py -m recipe.batch_size=20,1 devices=2": ["recipe.batch_size=1", "devices=2"],
        "train.py -m dataset.limit=60,5000": ["dataset.limit=5000", "1437"],
        "train.py -m model=vit_tiny_patch16_224 model.depth=12,5": ["model.depth=5", "12 blocks"],
        "train.py -m augmentation.htm.tau=0.5,1,-1": ["augmentation.htm.tau=-1"],
        "train.py -m name=x seed=0,1": ["name=x", "2 points"],
        "train.py -m seed=0,0": ["2 points of the sweep are this one run"],
        "train.py -m seed=glob(*)": ["seed=glob(*)", "no points"],
        "train.py -m model=cct_2_3x2,regnety_040": ["regnety_040"],
        "train.py -m seed=0,1 recipe.lr=0.1,-1": ["recipe.lr=-1"],
        "train.py -m augmentation=[htm],[cutout]": ["cutout"],
        "train.py -m model=cct_2_3x2,typo": ["model=typo"],
        "train.py -m 'seed=range(0,3)' name=x": ["name=x", "3 points"],
        "train.py -m recipe.epochs=1,x": ["recipe.epochs=x"],
        "train.py -m experiment=table1/cifar100_htm,table9/x": ["experiment=table9/x"],
    },
    "library models": {
        "train.py model=vit_tiny_patch16_224 model.architecture=xcit_nano_12_p16_224": [
            "model=vit_tiny_patch16_224",
            "block 0 is XCABlock",
        ],
        "train.py model=vit_tiny_patch16_224 model.architecture=resnet18": [
            "model.architecture=resnet18"
        ],
        "train.py model=resnet18 augmentation=[] model.htm_layer=2": [
            "model.htm_layer",
            "unknown key",
        ],
        "train.py model=resnet18 augmentation=[] model.architecture=res": [
            "model.architecture=res",
            "timm",
        ],
        "train.py model=resnet18 augmentation=[] +model.options.depth=3": [
            "model.options=",
            "'depth'",
        ],
        "train.py model=resnet18 augmentation=[] +model.options.drop_rate=null": [
            "model.options.drop_rate=null"
        ],
        "train.py model=resnet18 augmentation=[] +model.options.pretrained=true": [
            "model.options=",
            "pretrained",
        ],
        "train.py model=resnet18 augmentation=[] +model.options.features_only=true": [
            "one logit for each class"
        ],
        "train.py model=resnet18 augmentation=[] model.package=keras": [
            "model.package=keras",
            "'torchvision'",
        ],
        "train.py model=mobilenetv2_200 augmentation=[] model.stem=cifar": [
            "model.stem=cifar",
            "imagenet",
        ],
    },
    "output folders that cannot be written": {
        "train.py output_root=/dev/null": ["output_root=/dev/null", "writable"],
    },
    "image transforms": {
        "train.py recipe.transforms.scale=[2,3]": ["recipe.transforms.scale=[2.0, 3.0]"],
        "train.py recipe.transforms.scale=[1.0,0.5]": ["recipe.transforms.scale=[1.0, 0.5]"],
        "train.py recipe.transforms.auto_augment=rand-m9-mstd0.5.5": [
            "auto_augment=rand-m9-mstd0.5.5"
        ],
        "train.py recipe.transforms.auto_augment=rand": [
            "auto_augment=rand",
            "rand-m9-mstd0.5-inc1",
        ],
    },
    "loggers": {
        "train.py logger=wandb logger.mode=online": ["logger.mode=online", "offline"],
        "train.py logger.mode=offline": ["logger.mode", "unknown key"],
        "train.py logger=wandb logger.mode=sometimes": ["logger.mode=sometimes", "'offline'"],
    },
    "no key=value": {
        "train.py recipe.lr": ["recipe.lr", "key=value"],
        "train.py recipe.lr=[1,2": ["recipe.lr=[1,2", "key=value"],
        "train.py =3": ["=3"],
    },
    "several values without a sweep": {
        "train.py seed=0,1": ["seed=0,1", "--multirun"],
        "train.py 'seed=range(3)'": ["seed=range(3)", "--multirun"],
        "train.py model=cct_2_3x2,cct_7_3x1": ["model=cct_2_3x2,cct_7_3x1", "--multirun"],
        "train.py 'seed=choice(1,2)'": ["seed=choice(1,2)", "--multirun"],
    },
    "names that are no folder names": {
        "train.py name=a/b": ["name=a/b", "plain folder name"],
        "train.py name=..": ["name=..", "leading dot"],
        "train.py model.name=../x": ["model.name=../x", "plain folder name"],
    },
    "Hydra's folders and logs": {
        "train.py hydra.run.dir=/tmp/x": ["hydra.run.dir", "launcher and sweeper"],
        "train.py hydra.sweep.dir=x": ["hydra.sweep.dir"],
        "train.py hydra/job_logging=default": ["hydra/job_logging"],
        "train.py hydra.job.chdir=true": ["hydra.job.chdir"],
        "train.py hydra.mode=MULTIRUN": ["hydra.mode"],
    },
    "data sets without their folder": {
        "train.py dataset=image_folder": ["dataset.root=null", "image_folder"],
        "train.py dataset=image_folder dataset.root=nowhere": [
            "dataset.root=nowhere",
            "train/<class>/",
        ],
        "train.py dataset=imagenet1k": ["dataset.root=data/imagenet", "train/<class>/"],
        "train.py dataset.root=data": ["dataset.root=data", "digits needs no folder"],
    },
    "sizes that do not fit together": {
        "train.py model=vit_tiny_patch16_224 model.image_size=225": ["model.image_size=225", "16"],
        "train.py model=densenet264 augmentation=[] model.image_size=8": ["model.image_size=8"],
        "train.py model=cvt_6_4 model.image_size=30": ["model.image_size=30", "multiple of 4"],
        "train.py model.patch_size=4": ["model.conv_layers=2", "model.patch_size=4"],
    },
    "interpolations that lead nowhere": {
        "train.py recipe.lr=${nope}": ["nope"],
        "train.py 'recipe.lr=${recipe.lr}'": ["recipe.lr=${recipe.lr}"],
        "train.py 'recipe.lr=${oc.env:NOPE}'": ["recipe.lr=${oc.env:NOPE}", "NOPE"],
        "train.py 'seed=${share:1,0}'": ["seed=${share:1,0}"],
        "train.py 'dataset.workers=${cores:x}'": ["dataset.workers=${cores:x}"],
        "train.py 'seed=${unknown:1}'": ["seed=${unknown:1}"],
        "train.py 'seed=???'": ["seed=???", "must lead to a value"],
        "train.py 'seed=${recipe}'": ["seed=", "integer"],
    },
    "a stack or option that the model cannot serve": {
        "train.py model=resnet18": [
            "augmentation=[htm,vtm]",
            "resnet18",
            "augmentation=[mixup,cutmix]",
        ],
        "train.py model=resnet18 augmentation=[mixup,vtm] augmentation.vtm.layer=1": [
            "augmentation=[mixup,vtm]"
        ],
        "train.py experiment=table1/cifar100_htm model=wrn_40_4": [
            "[mixup,cutmix,htm]",
            "wrn_40_4",
        ],
        "train.py model=resnet18 augmentation=[] compile=true": ["compile=true", "cct or vit"],
    },
    "absurd sizes": {
        "train.py model.depth=100000000": ["model.depth", "less than or equal"],
        "train.py model.embed_dim=1000000000": ["model.embed_dim", "less than or equal"],
        "train.py model.num_heads=1000000000": ["model.num_heads", "less than or equal"],
        "train.py model.mlp_ratio=1e9": ["model.mlp_ratio", "less than or equal"],
        "train.py model.conv_layers=1000000000": ["model.conv_layers", "less than or equal"],
        "train.py model.image_size=1000000": ["model.image_size", "less than or equal"],
        "train.py recipe.batch_size=1000000000": ["recipe.batch_size", "less than or equal"],
        "train.py recipe.epochs=1000000000000": ["recipe.epochs", "less than or equal"],
        "train.py dataset.workers=1000000": ["dataset.workers", "less than or equal"],
        "train.py devices=1000000": ["devices", "less than or equal"],
        "train.py recipe.transforms.erasing_count=1000000000": [
            "recipe.transforms.erasing_count",
            "less than or equal",
        ],
        "train.py dataset.mean=[1e308,0,0]": ["dataset.mean", "less than or equal"],
        "train.py model.image_size=4096": ["model.image_size=4096", "1048576 tokens", "16384"],
        "train.py recipe.transforms.auto_augment=rand-m9-n99999999": [
            "auto_augment=rand-m9-n99999999",
            "must be one of timm's",
        ],
        "train.py recipe.transforms.eval_crop_pct=1e-300": ["eval_crop_pct=1e-300", "0.25"],
        "train.py dataset.std=[1e-9,1,1]": ["dataset.std.0=1e-09"],
    },
    "infinite and huge numbers": {
        "train.py recipe.lr=inf": ["recipe.lr=inf", "finite"],
        "train.py recipe.lr=1e308": ["recipe.lr=1e+308", "less than"],
        "train.py recipe.weight_decay=-inf": ["recipe.weight_decay=-inf"],
        "train.py recipe.transforms.hflip=1e400": ["hflip=inf"],
        "train.py seed=1111111111111111111111111111111": ["seed=1111", "less than 4294967296"],
        "train.py recipe.momentum=inf": ["recipe.momentum=inf"],
    },
    "texts that cannot be read": {
        "train.py 'seed=typo(1)'": ["seed=typo(1)", "Unknown function"],
        'train.py "name=\'a"': ["name='a", "quote"],
        "train.py name=a=b": ["name=a=b", "quote"],
        "train.py name=\xe9": ["quote"],
        "train.py 'recipe.lr=${'": ["recipe.lr=${", "quote"],
        "train.py 'seed=int(x)'": ["seed=int(x)"],
        "train.py seed=" + "1" * 5000: ["seed=111", "4300 digits"],
        "train.py 'name=" + "[" * 400 + "'": ["name=[["],
    },
    "control characters": {
        "train.py 'name=\"a\x1b[31m\"'": ["name=a?[31m", "plain folder name"],
        "train.py 'name=\"a\nb\"'": ["name=a b", "plain folder name"],
        "train.py 'name=\"\u202ea\"'": ["name=?a", "plain folder name"],
        "train.py 'device=\"\x07\"'": ["device=?", "'cpu'"],
    },
    "options named badly": {
        "train.py augmentation=[htm,htm]": ["augmentation=[htm,htm]", "once"],
        "train.py model=[cct_2_3x2,cct_7_3x1]": ["model=[cct_2_3x2,cct_7_3x1]", "no such option"],
        "train.py dataset=[digits]": ["dataset=[digits]", "no such option"],
        "train.py \"augmentation=''\"": ["augmentation=", "no such option"],
        "train.py \"model=''\"": ["model=", "no such option"],
        "train.py augmentation=../model/cct_2_3x2": [
            "augmentation=../model/cct_2_3x2",
            "no such option",
        ],
        "train.py model=/dev/null": ["model=/dev/null"],
        "train.py augmentation=[null]": ["augmentation=[null]"],
        "train.py recipe=3": ["recipe=3"],
    },
    "wrong prefixes": {
        "train.py ++typo=1": ["typo=1", "unknown key"],
        "train.py +seed=1": ["+seed=1"],
        "train.py ~typo": ["typo", "does not exist"],
        "train.py +model=cct_2_3x2": ["model"],
        "train.py ~recipe.lrr": ["recipe.lrr"],
        "train.py seed.x=1": ["seed.x"],
        "train.py ~recipe": ["recipe"],
        "train.py model@other=cct_2_3x2": ["other"],
    },
    "launchers and sweepers": {
        "train.py hydra/launcher=parallel": ["hydra/launcher=parallel", "-m"],
        "train.py -m seed=0,1 hydra/launcher=ray": ["hydra/launcher=ray"],
        "train.py -m seed=0,1 hydra/launcher=submitit_local": ["resume=never", "auto"],
        "train.py -m seed=0,1 hydra/sweeper=typo": ["sweeper=typo", "no such option"],
        "train.py -m seed=0,1 hydra.launcher.typo=1": ["typo"],
    },
    "folders where files belong, and files where folders do": {
        "train.py model.weights=folder": ["model.weights=folder", "no such file"],
        "eval.py checkpoint=folder": ["checkpoint=folder", "no such file"],
        "eval.py run=file.txt": ["file.txt"],
        "train.py output_root=file.txt": ["output_root=file.txt", "writable folder"],
        "train.py output_root=file.txt/x": ["output_root=file.txt/x", "writable folder"],
        "train.py dataset=image_folder dataset.root=file.txt": ["dataset.root=file.txt"],
        "scripts/report.py --outputs file.txt": ["outputs=file.txt"],
        "scripts/export.py checkpoint=noise.pt output=file.txt/x.safetensors": [
            "output=file.txt/x.safetensors"
        ],
    },
    "image folders with other classes or none": {
        "train.py dataset=image_folder dataset.root=images": ["dataset.root=images", "'dog'"],
        "train.py dataset=image_folder dataset.root=folder": [
            "dataset.root=folder",
            "train/<class>/",
        ],
        "train.py dataset=imagenet1k dataset.root=same": [
            "dataset.root=same",
            "1000 classes, found 1",
        ],
        "eval.py run=runs/good dataset=image_folder dataset.root=folder": ["dataset.root=folder"],
    },
    "start weights": {
        "train.py model.weights=noise.pt": ["model.weights=noise.pt", "not readable"],
        "train.py model.weights=empty.pt": ["model.weights=empty.pt", "not readable"],
        "train.py model.weights=other.pt": ["model.weights=other.pt"],
        "train.py model.weights=file.txt": ["model.weights=file.txt", "not readable"],
        "train.py model.weights=evil.pt": ["model.weights=evil.pt", "not readable"],
        "train.py model=vit_tiny_patch16_224 model.weights=other.pt model.pretrained=x": [
            "model.weights=other.pt",
            "not both",
        ],
        "train.py model=vit_tiny_patch16_224 model.weights=no.pth": [
            "model.weights=no.pth",
            "no such file",
        ],
    },
    "eval: not one of run and checkpoint": {
        "eval.py": ["run=None", "checkpoint=None"],
        "eval.py run=a checkpoint=b": ["run=a", "checkpoint=b"],
        "eval.py run=[a]": ["run=['a']", "path"],
        "eval.py checkpoint={a:1}": ["checkpoint={'a': 1}", "path"],
        "eval.py run=true": ["run=True", "path"],
        "eval.py run=nowhere weights=first": ["weights=first", "last or best"],
    },
    "eval: what does not belong": {
        "eval.py run=nowhere recipe.lr=1": ["recipe.lr=1", "does not belong"],
        "eval.py checkpoint=no.pt augmentation=[htm]": ["augmentation=[htm]", "does not belong"],
        "eval.py run=runs/good model=cct_7_3x1": ["model=cct_7_3x1", "does not belong"],
        "eval.py run=runs/good seed=1": ["seed=1", "does not belong"],
        "eval.py run=runs/good dataset.limit=3": ["dataset.limit=3", "does not belong"],
        "eval.py checkpoint=noise.pt name=x": ["name=x", "does not belong"],
    },
    "eval: files that are no checkpoints": {
        "eval.py checkpoint=no.pt": ["checkpoint=no.pt", "no such file"],
        "eval.py checkpoint=noise.pt": ["checkpoint=noise.pt", "not readable"],
        "eval.py checkpoint=empty.pt": ["checkpoint=empty.pt", "not readable"],
        "eval.py checkpoint=zip.pt": ["checkpoint=zip.pt", "not readable"],
        "eval.py checkpoint=evil.pt": ["checkpoint=evil.pt", "not readable"],
        "eval.py checkpoint=file.txt": ["checkpoint=file.txt", "not readable"],
        "eval.py checkpoint=text.safetensors": ["checkpoint=text.safetensors", "not readable"],
    },
    "eval: checkpoints of another model": {
        "eval.py checkpoint=other.pt": ["checkpoint=other.pt"],
        "eval.py checkpoint=other.pt model=resnet18": ["checkpoint=other.pt"],
        "eval.py checkpoint=other.pt model=vit_tiny_patch16_224": ["checkpoint=other.pt"],
        "eval.py run=runs/good": ["last.pt"],
    },
    "run folders that are none": {
        "eval.py run=typo": ["typo is no run folder", "no config.yaml"],
        "eval.py run=folder": ["folder is no run folder"],
        "eval.py run=runs/good weights=best": ["best.safetensors"],
        "eval.py run=runs/none": ["runs/none", "last.pt"],
        "scripts/export.py run=typo output=x.safetensors": ["typo is no run folder"],
        "scripts/draw_saliency.py typo": ["typo is no run folder"],
        "scripts/measure_differences.py typo": ["typo is no run folder"],
    },
    "run folders with a broken configuration": {
        "eval.py run=runs/brackets": ["runs/brackets", "config.yaml"],
        "eval.py run=runs/list": ["runs/list", "no configuration"],
        "eval.py run=runs/empty": ["runs/empty", "no configuration"],
        "eval.py run=runs/alias": ["runs/alias", "alias"],
        "eval.py run=runs/tag": ["runs/tag", "config.yaml"],
        "eval.py run=runs/twice": ["runs/twice", "twice"],
        "eval.py run=runs/deep": ["runs/deep", "deeply"],
        "eval.py run=runs/folder": ["runs/folder", "config.yaml"],
        "eval.py run=runs/unknown": ["recipe.lrr=1", "unknown key"],
        "eval.py run=runs/negative": ["recipe.lr=-1"],
        "eval.py run=runs/missing": ["recipe.lr", "no value"],
    },
    "runs that cannot go on": {
        "train.py name=good output_root=runs": ["name=good", "resume=auto"],
        "train.py name=good output_root=runs resume=auto seed=5": ["seed=5 (there 0)"],
        "train.py name=brackets output_root=runs resume=auto": ["runs/brackets", "config.yaml"],
        "train.py name=thesis output_root=runs resume=auto": ["runs/thesis is no run folder"],
        "train.py name=summary output_root=runs resume=auto": [
            "runs/summary/summary.json",
            "not readable",
        ],
        "train.py name=alias output_root=runs resume=auto": ["alias"],
    },
    "export: its file": {
        "scripts/export.py checkpoint=noise.pt": ["output=None", ".safetensors"],
        "scripts/export.py checkpoint=noise.pt output=x.pt": ["output=x.pt", ".safetensors"],
        "scripts/export.py checkpoint=noise.pt output=text.safetensors": [
            "output=text.safetensors",
            "exists",
        ],
        "scripts/export.py checkpoint=noise.pt output=[x]": ["output=['x']"],
        "scripts/export.py checkpoint=noise.pt output=/dev/null/x.safetensors": [
            "output=/dev/null/x.safetensors",
            "writable",
        ],
        "scripts/export.py checkpoint=noise.pt output=x.safetensors recipe.lr=1": [
            "recipe.lr=1",
            "does not belong",
        ],
        "scripts/export.py checkpoint=noise.pt output=x.safetensors": [
            "checkpoint=noise.pt",
            "not readable",
        ],
    },
    "reproduce: which runs": {
        "scripts/reproduce.py": ["study"],
        "scripts/reproduce.py table6": ["table6"],
        "scripts/reproduce.py table1 table2": ["table2"],
        "scripts/reproduce.py table1 --typo": ["--typo"],
        "scripts/reproduce.py table1 --seeds 0": ["--seeds", "'0'"],
        "scripts/reproduce.py table1 --seeds three": ["three"],
        "scripts/reproduce.py table1 --seeds -1": ["--seeds"],
        "scripts/reproduce.py table1 --scale huge": ["huge"],
    },
    "reproduce: data and devices": {
        "scripts/reproduce.py table1 --dataset mnist": ["mnist"],
        "scripts/reproduce.py table1 --dataset image_folder": ["image_folder"],
        "scripts/reproduce.py table1 --devices 3": ["devices=3"],
        "scripts/reproduce.py table1 --devices x": ["x"],
        "scripts/reproduce.py table2 --data nowhere": ["dataset.root=nowhere/imagenet"],
        "scripts/reproduce.py table1 --dataset digits --data x": ["dataset.root=x"],
        "scripts/reproduce.py table1 --scale digits --dataset cifar10": ["scale=digits"],
    },
    "reproduce: launchers": {
        "scripts/reproduce.py table1 --launcher ray": ["ray"],
        "scripts/reproduce.py table1 --jobs 2": ["jobs=2", "joblib"],
        "scripts/reproduce.py table1 --launcher joblib --nodes 2": ["nodes=2", "slurm"],
        "scripts/reproduce.py table1 --dry-run --status": ["--dry-run"],
        "scripts/reproduce.py table1 --launcher joblib --jobs 0": ["--jobs"],
        "scripts/emit_sbatch.py table9": ["table9"],
        "scripts/emit_sbatch.py table1 --cpus 0": ["--cpus"],
    },
    "cost": {
        "scripts/cost.py table9": ["table9"],
        "scripts/cost.py --seeds 0": ["--seeds"],
        "scripts/cost.py --device tpu": ["tpu"],
        "scripts/cost.py --scale smoke": ["scale=smoke"],
        "scripts/cost.py --batch-size -1": ["--batch-size"],
        "scripts/cost.py --dataset image_folder --data nowhere table1": ["nowhere"],
    },
    "report: its arguments": {
        "scripts/report.py --outputs nowhere": ["outputs=nowhere"],
        "scripts/report.py --scale huge": ["huge"],
        "scripts/report.py --devices x": ["x"],
        "scripts/report.py odd": ["odd"],
        "scripts/report.py --tables 2": ["--tables"],
    },
    "other scripts' arguments": {
        "scripts/draw_saliency.py": ["RUN"],
        "scripts/draw_saliency.py runs/good x.jpg": ["x.jpg", ".png"],
        "scripts/draw_saliency.py runs/good --images 0": ["--images=0"],
        "scripts/draw_saliency.py runs/good --images x": ["x"],
        "scripts/measure_latency.py --device tpu": ["tpu"],
        "scripts/measure_latency.py --scale huge": ["huge"],
        "scripts/measure_latency.py --repeats x": ["x"],
        "scripts/list_models.py typo_*": ["typo_*", "no such model"],
        "scripts/list_models.py a b": ["b"],
        "scripts/model_stats.py --typo": ["--typo"],
        "scripts/benchmark --sections typo": ["typo"],
        "scripts/benchmark --pairs x": ["x"],
        "scripts/measure_differences.py --typo": ["--typo"],
    },
}


def count_by_kind() -> str:
    """How many lines of each kind there are."""
    counts = [f"{len(lines):4d}  {kind}" for kind, lines in TABLE.items()]
    return "\n".join([*counts, f"{sum(map(len, TABLE.values()))} of {len(TABLE)} kinds"])


if __name__ == "__main__":
    print(count_by_kind())
