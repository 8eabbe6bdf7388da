"""The logs of field/: where each is from, its cause, and its half.

`python tests/logs/field.py` prints the figures of the half to write from, bare and behind each prefix, and what is not
right in it; `python tests/logs/field.py judge late` those of the judged logs, and no name. README.md counts how
often that was done.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FIELD = Path(__file__).with_name("field")
# What passes a log on puts this before its lines. Each name says "training" of a program that may not train.
PREFIXES: dict[str, Callable[[str], str]] = {
    "srun -l": "3: {}".format,
    "kubectl --prefix": "[pod/llama-sft-worker-0/pytorch] {}".format,
    "kubectl --timestamps": "2026-02-01T10:00:00.123456789Z {}".format,
    "docker compose": "trainer-1  | {}".format,
    "journalctl": "Feb 01 10:00:00 n4 llama-sft[812]: {}".format,
    "Ray": "(RayTrainWorker pid=77, ip=10.0.0.4) {}".format,
    "JSON": lambda line: json.dumps({"log": line + "\n", "stream": "stderr", "time": "2026-02-01T10:00:00.0Z"}),
    "srun -l in a Pod": "[pod/llama-sft-worker-0/pytorch] 3: {}".format,
}
# Logs that rules were mended by, after they were judged or at once: they count as `write` whatever their names say.
SEEN = frozenset(
    {
        "aaw-1581",
        "access-om2-100",
        "alpaca-lora-280",
        "ambar-149",
        "anki-14005",
        "anomalygpt-19",
        "antistorm-9",
        "anygpt-19",
        "aof6-143",
        "april-gan-9",
        "arduino-esp32-4870",
        "argo-3645",
        "auto-pokemon-6",
        "autocompressors-24",
        "aws-ofi-nccl-663",
        "awsome-185",
        "awsome-195",
        "axolotl-1473",
        "axolotl-2430",
        "axolotl-592",
        "basicsr-737",
        "behindthescenes-23",
        "bigdata-133",
        "billiard-380",
        "bitnami-28789",
        "blender-colab-5",
        "blender-vscode-191",
        "blurface-4",
        "bonito-78",
        "bvae-tts-3",
        "c3nl-61",
        "c4conf-2",
        "caffe2-1283",
        "capreolus-172",
        "casskop-20",
        "celery-1406",
        "celery-3631",
        "celery-9239",
        "cellpose-450",
        "chemspaceal-5",
        "cnp-flux-28772",
        "cobrar-12",
        "colvars-588",
        "containerd-12138",
        "containerd-7790",
        "containerd-cri-1014",
        "contrastive-htc-21",
        "convoy-2068",
        "cosmos-1324",
        "covizu-350",
        "crowddet-17",
        "cytoself-32",
        "darknet-1937",
        "datasetinsights-107",
        "db-gel-2316",
        "dcgm-149",
        "dcnv2-19",
        "dd-58",
        "deep-feature-flow-62",
        "deepops-1179",
        "deepspeech-670",
        "deepvariant-920",
        "deformgs-7",
        "della-2",
        "dept-4",
        "depth-from-motion-13",
        "desitarget-628",
        "detectron2-195",
        "detectron2-3900",
        "deviot-191",
        "devpod-63",
        "dft-26",
        "diffusers-1246",
        "diffusers-5354",
        "distillery-118",
        "distillkit-8",
        "dlrover-374",
        "dmlcloud-61",
        "docker-airflow-448",
        "docker-django-12",
        "docker-for-linux-569",
        "docker-minecraft-server-327",
        "docker-minecraft-server-654",
        "docker-node-761",
        "dockermonitor-42",
        "docui-119",
        "dolphinscheduler-2052",
        "dpgen-753",
        "dreamerv3-203",
        "dsmr-209",
        "dstack-2348",
        "dwconv3d-3",
        "easyconfigs-14463",
        "elasticsearch-41061",
        "electron-32489",
        "electron-39449",
        "element-call-978",
        "elixir-13615",
        "envs-4",
        "ert-8647",
        "erxes-2055",
        "espnet-1667",
        "espnet-3370",
        "espnet-4240",
        "espnet-4842",
        "fairscale-601",
        "fairseq-2386",
        "fairseq-2401",
        "fairseq-515",
        "fastchat-718",
        "faststream-1988",
        "fasttext-604",
        "fedml-594",
        "fgt-21",
        "fkf-31",
        "flan-alpaca-10",
        "flash-attention-1708",
        "flash-attention-234",
        "flash-attention-508",
        "flavr-58",
        "flood-forecasting-87",
        "flutter-36655",
        "fluxgym-156",
        "former-dfer-1",
        "functional-diffusion-4",
        "gaitset-170",
        "gdrnet-109",
        "gemma3-object-detection-48",
        "genai-examples-706",
        "gendl-9",
        "gln-14",
        "gnn-tracking-353",
        "godot-85451",
        "goproxy-40",
        "gpt-neox-1079",
        "gpu-manager-24",
        "gpu-recipes-2",
        "gpud-46",
        "grizzly-416",
        "grx-gym-6",
        "gunicorn-3136",
        "gunicorn-3233",
        "gunicorn-76",
        "h2o-llmstudio-98",
        "ha-culligan-8",
        "ha-iec-216",
        "ha-windhager-31",
        "haos-761",
        "hashcat-2221",
        "hear-eval-247",
        "hemelb-4",
        "hemelb-813",
        "hf-notebooks-136",
        "hifiles-135",
        "hku-dasc-2",
        "horovod-1680",
        "horovod-2619",
        "horovod-347",
        "horovod-465",
        "horovod-850",
        "horovod-969",
        "hostg-7",
        "hub-1643",
        "hugectr-404",
        "humangaussian-4",
        "instanceloc-20",
        "instructlab-2341",
        "instructlab-training-520",
        "intro-to-go-1",
        "ipex-llm-5059",
        "itemphysic-1",
        "jade-194",
        "joblib-812",
        "julia-53858",
        "k8s-device-1431",
        "k9s-174",
        "kair-103",
        "katib-1112",
        "keras-13286",
        "keras-14573",
        "keras-8680",
        "keras-tuner-390",
        "kmcuda-80",
        "kohya-1151",
        "kohya-521",
        "kohya-897",
        "kohya-ss-1523",
        "kohya-ss-2386",
        "koku-4562",
        "ktrain-160",
        "kubeblocks-4703",
        "kubefate-64",
        "kubeflow-1261",
        "kubeform-138",
        "kubernetes-54381",
        "kubernetes-56891",
        "kubernetes-97131",
        "lammps-3765",
        "lastz-chains-48",
        "lghorizon-101",
        "libfabric-10001",
        "lightning-9242",
        "liqudnet-6",
        "llama-cookbook-186",
        "llamafactory-3534",
        "llamafactory-3839",
        "llamafactory-4557",
        "llamafactory-4849",
        "llamafactory-5071",
        "llamafactory-8261",
        "llava-1422",
        "llava-969",
        "llm-finetuning-toolkit-158",
        "log4r-12",
        "logerrors-14",
        "longchat-31",
        "lora-253",
        "lsqb-61",
        "lumi-guide-3",
        "mace-819",
        "mammotion-80",
        "maskground-7",
        "maskrcnn-158",
        "mass-16",
        "max-recommender-8",
        "mcinabox-49",
        "mcmicro-163",
        "mcp-reborn-391",
        "megatron-1525",
        "megatron-176",
        "megatron-deepspeed-400",
        "megatron-llm-11",
        "mgfn-35",
        "mimickit-107",
        "ml-using-k8s-1",
        "mm-det-20",
        "mmdetection-1179",
        "mmdetection-1997",
        "mmdetection-7876",
        "mmengine-1155",
        "mmengine-155",
        "mmvp-26",
        "modernmt-216",
        "mooncake-573",
        "mpi-operator-647",
        "mrc-flat-nested-ner-56",
        "ms-swift-2247",
        "ms-swift-2634",
        "ms-swift-5884",
        "mst-7",
        "multihuman-2",
        "mxnet-8366",
        "naifu-35",
        "nanogpt-525",
        "nanogpt-704",
        "nccl-1029",
        "nccl-1105",
        "nccl-1368",
        "nccl-1698",
        "nccl-258",
        "nccl-426",
        "nccl-583",
        "nccl-mesh-56",
        "nccl-tests-107",
        "nccl-tests-284",
        "nccl-tests-29",
        "nccl-tests-71",
        "nemo-14829",
        "nemo-5819",
        "nemo-6457",
        "nemo-7351",
        "nequip-67",
        "neuron-samples-52",
        "neuronx-nemo-28",
        "nextcloud-32825",
        "nginx-unit-285",
        "nnunet-1594",
        "nservicebus-86",
        "oak-905",
        "ockam-294",
        "ofa-271",
        "ofi-nccl-156",
        "ompi-12038",
        "ompi-12146",
        "ontohub-335",
        "open-clip-283",
        "open-llava-next-15",
        "openfoam-app-333",
        "openneuro-363",
        "opennmt-373",
        "openrlhf-187",
        "openrlhf-312",
        "openshot-2812",
        "opensloth-17",
        "optimum-neuron-425",
        "paxcounter-635",
        "pfedsd-3",
        "pgo-776",
        "pip-3024",
        "pipedream-28",
        "plmfit-40",
        "prime-rl-3399",
        "prompt4nr-3",
        "ps-mt-10",
        "psifx-16",
        "pybnf-118",
        "pytorch-105287",
        "pytorch-108732",
        "pytorch-113496",
        "pytorch-128680",
        "pytorch-134212",
        "pytorch-136726",
        "pytorch-1967",
        "pytorch-2542",
        "pytorch-29482",
        "pytorch-52208",
        "pytorch-58155",
        "pytorch-60477",
        "pytorch-69197",
        "pytorch-75658",
        "pytorch-85949",
        "pytorch-examples-540",
        "pytorch-operator-264",
        "pytorch-operator-333",
        "qwen-vl-103",
        "rabbitmq-operator-684",
        "ray-24305",
        "ray-31828",
        "ray-52223",
        "realm-338",
        "realtabformer-37",
        "redis-operator-1056",
        "remora-226",
        "remote-ha-249",
        "replicate-117",
        "repvit-65",
        "returnn-1486",
        "rheos-59",
        "rocm-build-851",
        "ros-k8s-22",
        "ros2-demos-658",
        "rrhf-35",
        "rust-59122",
        "sagemaker-examples-1234",
        "sagemaker-sdk-658",
        "saige-53",
        "sam2-492",
        "scepter-48",
        "scream-2337",
        "scylladb-2099",
        "sd-scripts-2137",
        "sd-scripts-550",
        "sd-scripts-567",
        "sdps-net-16",
        "second-253",
        "sedfoam-156",
        "sentence-transformers-3256",
        "sentry-self-hosted-3133",
        "sfa3d-48",
        "shine-30",
        "sidekiq-4323",
        "silnlp-670",
        "simple-grpo-20",
        "simpletuner-1880",
        "simpletuner-59",
        "simswap-370",
        "singularity-5203",
        "sleap-365",
        "slowfast-159",
        "smv-714",
        "snakemake-2912",
        "snparcher-252",
        "sourceio-467",
        "specify-6490",
        "speechbrain-2401",
        "speechbrain-2588",
        "spleeter-web-92",
        "sst-80",
        "stable-diffusion-on-gcp-12",
        "statbotics-369",
        "stt-2238",
        "t5x-997",
        "taskcafe-47",
        "telescope-745",
        "tensorflow-20090",
        "tensorflowonspark-108",
        "textattack-501",
        "tinyllava-130",
        "tinyllava-factory-142",
        "torch-tutorials-2611",
        "torchio-1183",
        "torchtitan-1287",
        "torchtune-2093",
        "torchtune-2301",
        "train-deepseek-8",
        "trainer-1509",
        "trainer-2034",
        "trainer-903",
        "transformers-14531",
        "transformers-4122",
        "transunet-4",
        "tranx-41",
        "trl-1723",
        "trl-2996",
        "trl-3375",
        "tsm-81",
        "ucx-9908",
        "ultralytics-4176",
        "unidepth-58",
        "unsloth-1894",
        "unsloth-2759",
        "var-136",
        "verifiers-96",
        "verl-1098",
        "verl-2380",
        "verl-4921",
        "vilbert-75",
        "visdet-95",
        "vista-61",
        "vits-397",
        "vllm-40652",
        "volcano-2745",
        "vulmatch-171",
        "wandb-4628",
        "weathergen-1811",
        "web3-unity-727",
        "whisper-finetune-112",
        "wlasl-15",
        "x-flux-75",
        "xtuner-387",
        "yolo-world-165",
        "yolor-94",
        "yolov5-475",
        "yolov5-5086",
        "zluda-223",
        "zluda-306",
    }
)

# Logs of `write` that stay unknown: nothing in them shows that a training job, its node or its launcher wrote the
# error, or that a warning ended anything, or that a log that ends hangs.
UNKNOWN = frozenset(
    {
        "alpaca-lora-280",
        "atrain-10",
        "awsome-185",
        "cogvlm2-207",
        "colossalai-2748",
        "cortex-17",
        "datasets-6315",
        "desitarget-628",
        "detectron2-3900",
        "dockermonitor-42",
        "e3sm-8699",
        "fedml-594",
        "ffdl-74",
        "flyte-3686",
        "functional-diffusion-4",
        "here-sacct-oom",
        "here-smi-none-text",
        "here-tcpstore-recv",
        "horovod-298",
        "horovod-347",
        "horovod-3658",
        "horovod-410",
        "horovod-786",
        "hostg-7",
        "kubefate-64",
        "kubeflow-1261",
        "kubernetes-91600",
        "lightning-17066",
        "llama-cpp-3230",
        "llm-foundry-511",
        "megatron-176",
        "megatron-deepspeed-400",
        "musicgen-7",
        "nccl-1027",
        "nccl-1706",
        "nccl-447",
        "nextflow-5932",
        "nnunet-1343",
        "operate-first-1352",
        "paddle-models-4064",
        "pytorch-75658",
        "pytorch-85949",
        "ray-52223",
        "realm-338",
        "sagemaker-examples-3827",
        "sematic-853",
        "snakemake-slurm-371",
        "spawn-cbio-232",
        "t5x-997",
        "toil-4706",
        "tranx-41",
        "trixie-35",
        "trixie-45",
        "unidepth-58",
        "vllm-5645",
        "zetta-671",
    }
)


@dataclass(frozen=True)
class FieldLog:
    """One log; `cause` is the name of a page, None for a log without a failure of a training job, or `other`.

    `other` is a failure of a training job that no page covers: right would be to say unknown, so it never counts as
    right, and any page named as sure or likely is wrong.
    """

    name: str
    source: str
    cause: str | None
    text: str
    late: bool = False

    @property
    def half(self) -> str:
        """`judge` or `write`: by the name alone; `late`: filed after the rules, from searches of other words."""
        if self.late:
            return "late"
        odd = hashlib.sha256(self.name.encode()).digest()[0] % 2
        return "judge" if odd and self.name not in SEEN else "write"


def read(path: Path) -> FieldLog:
    """A file of field/: `source: ...`, `cause: ...`, an empty line, the log."""
    head, _, text = path.read_text(encoding="utf-8").partition("\n\n")
    source, cause = (line.partition(": ")[2] for line in head.splitlines())
    return FieldLog(path.stem, source, None if cause == "none" else cause, text, path.parent.name == "late")


def logs(half: str) -> Iterator[FieldLog]:
    """The logs of one half, by name."""
    return (log for log in map(read, sorted(FIELD.rglob("*.log"))) if log.half == half)


def behind(prefix: str, text: str) -> str:
    """The text with a prefix before each of its lines."""
    return "\n".join(map(PREFIXES[prefix], text.splitlines()))


def judged(log: FieldLog, text: str | None = None) -> tuple[str, str | None]:
    """(right, wrong, symptom, unknown, quiet or false alarm, the name that `explain` gives).

    `symptom`: another name than the log's cause, told as only a symptom. It claims no cause, so it is not wrong, and it
    finds none, so it is not right: `main` counts it as unknown, and says how many. On a log without a failure it is a
    false alarm like any other. `text` is what is explained in place of the log's own.
    """
    from threefold.explain.explain import Confidence, explain

    found = explain(log.text if text is None else text)
    name = found.known.name if found is not None else None
    if log.cause is None:
        return ("quiet" if name is None else "false alarm"), name
    if found is None or name == log.cause:
        return ("unknown" if name is None else "right"), name
    return ("symptom" if found.confidence is Confidence.SYMPTOM else "wrong"), name


def figures(half: str, prefix: str | None = None) -> Counter[str]:
    """How many logs of a half are right, wrong, symptom, unknown, quiet, false alarms."""
    return Counter(judged(log, behind(prefix, log.text) if prefix else None)[0] for log in logs(half))


def retries(half: str) -> Counter[bool]:
    """In how many failures the advice to start the job again is that of their cause, which is a page's."""
    from threefold.explain.explain import explain
    from threefold.explain.known import KnownError, Retry, known_errors

    known: Mapping[str | None, KnownError] = {**known_errors()}
    right = Counter[bool]()
    for log in logs(half):
        if log.cause in known:
            told = explain(log.text)
            advice = told.known.retry if told is not None else Retry.NO
            right[advice is known[log.cause].retry] += 1
    return right


def main() -> None:
    for half in sys.argv[1:] or ["write"]:
        for prefix in (None, *PREFIXES):
            count = figures(half, prefix)
            unknown = count["unknown"] + count["symptom"]
            failures = count["right"] + count["wrong"] + unknown
            print(
                f"{half}, {prefix or 'bare'}: {count['right']} of {failures} right ({count['right'] / failures:.0%}), "
                f"{count['wrong']} wrong, {unknown} unknown ({count['symptom']} of them told as only a symptom); "
                f"{count['false alarm']} false alarms in {count['false alarm'] + count['quiet']}"
            )
        right = retries(half)
        print(f"{half}: retry right in {right[True]} of {right.total()} ({right[True] / right.total():.1%})")
        for log in logs(half) if half == "write" else ():  # a judged log stays unread
            verdict, name = judged(log)
            if verdict not in ("right", "quiet"):
                print(f"  {log.name}: {verdict}, {name} for {log.cause}")


if __name__ == "__main__":
    main()
