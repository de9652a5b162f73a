"""Where losses come from: the five papers, and the publications of the baselines."""

from typing import NamedTuple


class Paper(NamedTuple):
    """A paper that this library implements; ``folder`` is that of its tables in ``papers/``."""

    tag: str
    authors: str
    title: str
    venue: str
    folder: str
    errata: str


PAPERS = {
    "NGY": Paper(
        "LMD",
        "Nguyen, Gamboa, Zhang, Chhaibi, Gratton, Giaccone",
        "Large Margin Discriminative Loss for Classification",
        "",
        "lmd",
        "N",
    ),
    "NGR": Paper(
        "ROB",
        "Nguyen, Gamboa, Zhang, Chhaibi, Gratton, Giaccone",
        "Training More Robust Classification Model via Discriminative Loss and Gaussian Noise "
        "Injection",
        "TMLR",
        "robust",
        "R",
    ),
    "ZHO": Paper(
        "LTLM",
        "Zhou, Liu, Zhai, Jiang, Gao, Ji",
        "Learning Towards the Largest Margins",
        "ICLR 2022",
        "ltlm",
        "Z",
    ),
    "KOB": Paper(
        "LMS",
        "Kobayashi",
        "Large Margin In Softmax Cross-Entropy Loss",
        "BMVC 2019",
        "kobayashi",
        "K",
    ),
    "ODN": Paper(
        "ODN", "anonymous", "Optimal Margin Distribution Network", "submission", "odn", "D"
    ),
}
"""By the first part of the marks that docstrings carry, as in ZHO-COSFACE."""

FAMILIES = {
    "Discriminative loss (LMD)": "NGY",
    "Robust training (ROB)": "NGR",
    "Cosine margins (LTLM)": "ZHO",
    "Margins in softmax (LMS)": "KOB",
    "Margin distribution (ODN)": "ODN",
    "Baselines": "BAS",
}
"""Groups of the navigation and the mark of their losses."""

ORIGINALS = {
    "adacos": "Zhang, Zhao, Qiao, Wang, Li: *AdaCos: Adaptively Scaling Cosine Logits for "
    "Effectively Learning Deep Face Representations*, CVPR 2019",
    "adaface": "Kim, Jain, Liu: *AdaFace: Quality Adaptive Margin for Face Recognition*, CVPR 2022",
    "arcface": "Deng, Guo, Xue, Zafeiriou: *ArcFace: Additive Angular Margin Loss for Deep Face "
    "Recognition*, CVPR 2019",
    "center": "Wen, Zhang, Li, Qiao: *A Discriminative Feature Learning Approach for Deep Face "
    "Recognition*, ECCV 2016",
    "cosface": "Wang et al.: *CosFace: Large Margin Cosine Loss for Deep Face Recognition*, CVPR "
    "2018; Wang, Cheng, Liu, Liu: *Additive Margin Softmax for Face Verification*, IEEE Signal "
    "Processing Letters 2018",
    "curricularface": "Huang et al.: *CurricularFace: Adaptive Curriculum Learning Loss for Deep "
    "Face Recognition*, CVPR 2020",
    "dense_hinge": "Weston, Watkins: *Support Vector Machines for Multi-Class Pattern "
    "Recognition*, ESANN 1999",
    "elasticface": "Boutros, Damer, Kirchbuchner, Kuijper: *ElasticFace: Elastic Margin Loss for "
    "Deep Face Recognition*, CVPR Workshops 2022",
    "focal": "Lin, Goyal, Girshick, He, Dollár: *Focal Loss for Dense Object Detection*, ICCV 2017",
    "gaussian_mixture": "Wan, Zhong, Li, Chen: *Rethinking Feature Distribution for Loss Functions "
    "in Image Classification*, CVPR 2018",
    "generalized_cross_entropy": "Zhang, Sabuncu: *Generalized Cross Entropy Loss for Training "
    "Deep Neural Networks with Noisy Labels*, NeurIPS 2018",
    "label_smoothing": "Szegedy, Vanhoucke, Ioffe, Shlens, Wojna: *Rethinking the Inception "
    "Architecture for Computer Vision*, CVPR 2016",
    "layer_margin": "Elsayed, Krishnan, Mobahi, Regan, Bengio: *Large Margin Deep Networks for "
    "Classification*, NeurIPS 2018",
    "ldam": "Cao, Wei, Gaidon, Arechiga, Ma: *Learning Imbalanced Datasets with "
    "Label-Distribution-Aware Margin Loss*, NeurIPS 2019",
    "logit_adjustment": "Menon, Jayasumana, Rawat, Jain, Veit, Kumar: *Long-tail Learning via "
    "Logit Adjustment*, ICLR 2021; Ren et al.: *Balanced Meta-Softmax for Long-Tailed Visual "
    "Recognition*, NeurIPS 2020",
    "logit_norm": "Wei, Xie, Cheng, Feng, An, Li: *Mitigating Neural Network Overconfidence with "
    "Logit Normalization*, ICML 2022",
    "lsoftmax": "Liu, Wen, Yu, Yang: *Large-Margin Softmax Loss for Convolutional Neural "
    "Networks*, ICML 2016",
    "magface": "Meng, Zhao, Huang, Zhou: *MagFace: A Universal Representation for Face Recognition "
    "and Quality Assessment*, CVPR 2021",
    "max_hinge": "Crammer, Singer: *On the Algorithmic Implementation of Multiclass Kernel-based "
    "Vector Machines*, JMLR 2001",
    "normface": "Wang, Xiang, Cheng, Yuille: *NormFace: L2 Hypersphere Embedding for Face "
    "Verification*, ACM Multimedia 2017",
    "sphereface": "Liu, Wen, Yu, Li, Raj, Song: *SphereFace: Deep Hypersphere Embedding for Face "
    "Recognition*, CVPR 2017",
    "stability": "Zheng, Song, Leung, Goodfellow: *Improving the Robustness of Deep Neural "
    "Networks via Stability Training*, CVPR 2016",
    "symmetric_cross_entropy": "Wang, Ma, Chen, Luo, Yi, Bailey: *Symmetric Cross Entropy for "
    "Robust Learning with Noisy Labels*, ICCV 2019",
    "vs_loss": "Kini, Paraskevas, Oymak, Thrampoulidis: *Label-Imbalanced and Group-Sensitive "
    "Classification under Overparameterization*, NeurIPS 2021",
}
"""Who proposed a loss that one of the five papers uses or compares with."""
